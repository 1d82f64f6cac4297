# SPDX-License-Identifier: Apache-2.0

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import slurm_health
from slurm_health.records import gpu_load, record_codec, standings
from slurm_health.records.decoding import JsonDecoder, from_json, from_msgpack
from slurm_health.records.record_codec import KINDS, VERSION, Entry, NewerVersion, decode, encode
from slurm_health.records.records import Record
from slurm_health.records.script_records import ScriptStarted
from tests.strategies import random_record
from tests.strategies import records as any_record


def test_records_made_at_random_are_of_every_kind_and_come_back_as_they_were_written() -> None:
    kinds = set()
    for seed in range(3000):
        record = random_record(Random(seed))
        kinds.add(type(record))
        line = encode(record, entry_id="n1:0", time_s=float(seed))
        entry = decode(line)
        assert entry == Entry(id="n1:0", time_s=float(seed), kind=entry.kind, record=record)
        assert line.find(b"\n") == len(line) - 1
    assert kinds == {*KINDS}


@given(any_record(), st.data())
def test_a_record_cut_short_is_not_another_record(record: Record, data: st.DataObject) -> None:
    line = encode(record, entry_id="n1:0", time_s=1.0).rstrip(b"\n")

    with pytest.raises(ValueError):  # noqa: PT011 - msgspec words it
        decode(line[: data.draw(st.integers(0, len(line) - 1))])


@given(st.binary(max_size=40) | st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000]))
def test_any_line_is_a_record_or_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec words it
        decode(line)


def test_every_kind_has_a_name_of_its_own_and_is_listed() -> None:
    names = [str(kind.__struct_config__.tag) for kind in KINDS]

    assert len(set(names)) == len(names)
    assert set(Record.__subclasses__()) == set(KINDS)


def test_a_kind_that_is_not_known_is_kept_and_a_field_that_is_not_is_passed_over() -> None:
    kind = b'{"v":1,"id":"n1:3","time_s":2.5,"kind":"from_the_future","more":[1]}\n'
    field = b'{"v":1,"id":"s:1","time_s":2,"kind":"script_started","script":"s","pid":7,"new":1}\n'

    assert decode(kind) == Entry(id="n1:3", time_s=2.5, kind="from_the_future", record=None)
    assert decode(field).record == ScriptStarted(script="s", pid=7)


def test_a_newer_version_is_refused_by_its_number() -> None:
    line = json.dumps({"v": VERSION + 1, "id": "m:0", "time_s": 0.0, "kind": "script_started"})

    with pytest.raises(NewerVersion, match=rf"version {VERSION + 1}, known {VERSION}") as caught:
        decode(line.encode())

    assert caught.value.version == VERSION + 1


@pytest.mark.parametrize(
    "line",
    [
        b'{"v":1,"id":"m:0","time_s":0,"kind":"script_started"}',
        b'{"v":1,"id":"m:0","time_s":0,"kind":"script_started","pid":"7"}',
        b'{"v":1,"id":"m:0","time_s":0,"kind":"round_ended","round":-1}',
        b'{"id":"m:0","time_s":0,"kind":"script_started","pid":7}',
    ],
)
def test_a_line_with_missing_or_wrong_fields_is_not_a_record(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - msgspec words it
        decode(line)


def test_a_file_name_that_is_not_utf_8_can_be_recorded() -> None:
    name = b"tr\xffain.sh".decode(errors="surrogateescape")

    entry = decode(encode(ScriptStarted(script=name, pid=1), entry_id="s:0", time_s=0.0))

    assert entry.record == ScriptStarted(script=r"tr\udcffain.sh", pid=1)


# --- nested without end, wherever bytes come from -------------------------------------------------


PACKAGE = Path(slurm_health.__file__).parent
DEEP = b'{"x":' + b"[" * 100_000


class Thing(msgspec.Struct):
    """Something that is expected."""

    a: int = 0


@pytest.mark.parametrize(
    "read",
    [
        lambda: from_json(DEEP, Thing),
        lambda: from_json(DEEP, object),
        lambda: from_msgpack(b"\x81\xa1x" + b"\x91" * 100_000, Thing),
        lambda: JsonDecoder[Thing](Thing).decode(DEEP),
        lambda: record_codec.decode(DEEP),
        lambda: standings.read(DEEP, now_s=0.0),
    ],
)
def test_what_is_nested_without_end_is_a_value_error(read: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        read()


def test_a_line_of_a_gpu_monitor_that_is_nested_without_end_is_none() -> None:
    assert gpu_load.decode(DEEP) is None


def test_bytes_are_decoded_in_one_place() -> None:
    direct = re.compile(r"msgspec\.(?:json|msgpack)\.(?:decode|Decoder)\b")
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if direct.search(path.read_text())
    }
    assert users == {"records/decoding.py"}
