# SPDX-License-Identifier: Apache-2.0
"""What property tests draw from: node names, records of every kind, verdicts."""

import functools
import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from hypothesis import strategies as st

from slurm_health.records.record_codec import KINDS
from slurm_health.records.records import Record, VerdictReached
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict

_Maker = Callable[[Random], Any]
# What names, texts and numbers may be, and what ends or hides where it is shown.
_WORDS = (
    "",
    "n1",
    "n2",
    "n3",
    "lab",
    "0",
    "-1",
    "network",
    "\x1b[31m",
    "\n",
    "\0",
    "=",
    "n[1-9]",
    "\u202e",
)
# Any letter that UTF-8 has: Latin ones, and a few of everywhere.
_LETTERS = (*range(0x250), *range(0x250, 0xD800, 97), *range(0xE000, 0x110000, 4999))
_FLOATS = (0.0, -0.0, 1.0, 1e308, -1e308, 5e-324, 2**53 + 2.0, 1.7e9)

node_names = st.from_regex(
    r"[a-z]{1,3}(0{0,2}[0-9]{1,3})?([-_][a-z]{1,2}[0-9]{0,2})?", fullmatch=True
)
node_lists = st.lists(node_names, unique=True, max_size=8)


def records() -> st.SearchStrategy[Record]:
    """Draw a record of any kind, with any value in each of its fields."""
    return st.integers(0, 2**64 - 1).map(lambda seed: random_record(Random(seed)))


def random_record(random: Random) -> Record:
    """Make a record of any kind, with any value in each field: sooner than each field is drawn."""
    return _as_record(random.choice(_record_makers())(random))


@functools.cache
def _record_makers() -> list[_Maker]:
    return [_maker(msgspec.inspect.type_info(kind)) for kind in KINDS]


def _maker(info: object) -> _Maker:
    match info:
        case msgspec.inspect.StrType():
            return _random_text
        case msgspec.inspect.IntType(ge=ge):
            least = ge or 0
            return lambda random: random.choice(
                (least, least + 1, 2**40, random.randint(least, 99))
            )
        case msgspec.inspect.FloatType():
            return _random_float
        case msgspec.inspect.BoolType():
            return lambda random: random.random() < 0.5
        case msgspec.inspect.NoneType():
            return lambda _: None
        case msgspec.inspect.EnumType(cls=cls):
            members = list(cls)
            return lambda random: random.choice(members)
        case msgspec.inspect.ListType(item_type=item):
            return _several(_maker(item), list)
        case msgspec.inspect.VarTupleType(item_type=item):
            return _several(_maker(item), tuple)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            pair = _maker(key), _maker(value)
            pairs = _several(lambda random: (pair[0](random), pair[1](random)), list)
            return lambda random: dict(pairs(random))
        case msgspec.inspect.UnionType(types=types):
            makers = [_maker(each) for each in types]
            return lambda random: random.choice(makers)(random)
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            of_field = {field.name: _maker(field.type) for field in fields}
            return lambda random: cls(**{name: make(random) for name, make in of_field.items()})
    raise AssertionError(f"no way to make {info}")


def _several(make: _Maker, kind: Callable[[list[object]], object]) -> _Maker:
    return lambda random: kind([make(random) for _ in range(random.randint(0, 3))])


def _random_text(random: Random) -> str:
    if random.random() < 0.5:
        return random.choice(_WORDS)
    return "".join(chr(random.choice(_LETTERS)) for _ in range(random.randint(0, 12)))


def _random_float(random: Random) -> float:
    return random.choice((*_FLOATS, random.uniform(-1e3, 1e3), random.expovariate(1e-9)))


def _as_record(value: object) -> Record:
    assert isinstance(value, Record)
    return value


@st.composite
def verdicts(draw: st.DrawFn) -> VerdictReached:
    """Draw a verdict about up to eight nodes, and about paths between those that are well."""
    names = draw(st.lists(node_names, unique=True, min_size=1, max_size=8))
    nodes = [
        NodeVerdict(node=name, level=draw(st.sampled_from(Level)), reason=draw(st.text()))
        for name in names
    ]
    well = [node.node for node in nodes if node.level is Level.HEALTHY]
    pairs = list(itertools.combinations(well, 2))
    bad = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=3)) if pairs else []
    levels = st.sampled_from([Level.FAULTY, Level.SLOW, Level.INCONCLUSIVE])
    return VerdictReached(
        nodes=nodes, paths=[LinkVerdict(ends=ends, level=draw(levels)) for ends in bad]
    )
