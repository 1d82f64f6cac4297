# SPDX-License-Identifier: Apache-2.0
"""What is nested without end is an error as any other, wherever bytes come from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import slurm_health
from slurm_health.records import gpu_load, record_codec, standings
from slurm_health.records.decoding import JsonDecoder, from_json, from_msgpack

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
