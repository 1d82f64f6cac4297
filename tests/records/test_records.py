# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
