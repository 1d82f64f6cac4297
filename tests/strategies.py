# SPDX-License-Identifier: Apache-2.0
"""What property tests draw from: node names, records of every kind, verdicts."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import strategies as st

from slurm_health.records.record_codec import KINDS
from slurm_health.records.records import Record, VerdictReached
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict

node_names = st.from_regex(
    r"[a-z]{1,3}(0{0,2}[0-9]{1,3})?([-_][a-z]{1,2}[0-9]{0,2})?", fullmatch=True
)
node_lists = st.lists(node_names, unique=True, max_size=8)


def _values(info: object) -> st.SearchStrategy[object]:  # noqa: C901 - one case for each kind
    match info:
        case msgspec.inspect.StrType():
            return st.text(max_size=12)
        case msgspec.inspect.IntType(ge=ge):
            return st.integers(ge or 0, 2**40)
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.EnumType(cls=cls):
            return st.sampled_from(cls)
        case msgspec.inspect.ListType(item_type=item):
            return st.lists(_values(item), max_size=3)
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(_values(item), max_size=3).map(tuple)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_values(key), _values(value), max_size=3)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of([_values(each) for each in types])
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: _values(field.type) for field in fields})
    raise AssertionError(f"no strategy for {info}")


def records() -> st.SearchStrategy[Record]:
    """Draw a record of any kind, with any value in each of its fields."""
    drawn = [_values(msgspec.inspect.type_info(kind)) for kind in KINDS]
    return st.one_of(drawn).map(_as_record)


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
