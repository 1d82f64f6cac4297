# SPDX-License-Identifier: Apache-2.0
"""The lines of a journal: one JSON object each, typed and versioned.

Every line carries `v` (the version of the vocabulary), `id` (writer and number), `time_s` (the
writer's clock, seconds since the epoch) and `kind`. A reader keeps kinds it does not know and
refuses a newer `v`.
"""

from __future__ import annotations

import functools

import msgspec

from slurm_health.records import records, script_records
from slurm_health.records.decoding import JsonDecoder
from slurm_health.records.records import Record

VERSION = 1
KINDS = (*records.KINDS, *script_records.KINDS)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of every line."""

    v: int
    id: str
    time_s: float
    kind: str


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a journal. `record` is None when this version does not know its kind."""

    id: str
    time_s: float
    kind: str
    record: Record | None


class NewerVersion(ValueError):
    """A line was written by a newer version of this vocabulary."""

    def __init__(self, version: int) -> None:
        self.version = version
        super().__init__(f"record version {version}, known {VERSION}")


_TYPES = {str(kind.__struct_config__.tag): kind for kind in KINDS}
_encoder = msgspec.json.Encoder()
_header_decoder = JsonDecoder[Header](Header)


@functools.cache
def _decoder_of(kind: str) -> JsonDecoder[Record] | None:
    """Return the decoder of a kind. They are made on demand: a process reads few kinds."""
    return JsonDecoder[Record](_TYPES[kind]) if kind in _TYPES else None


def encode(record: Record, *, entry_id: str, time_s: float) -> bytes:
    """Return the line that stores `record`, with its newline."""
    head = {"v": VERSION, "id": entry_id, "time_s": time_s}
    try:
        # Two objects made one: a verdict has megabytes, which are not built twice.
        return _encoder.encode(head)[:-1] + b"," + _encoder.encode(record)[1:] + b"\n"
    except UnicodeEncodeError:  # a file name that is not UTF-8, as Python represents it
        return _encoder.encode(_encodable({**head, **msgspec.to_builtins(record)})) + b"\n"


def _encodable(value: object) -> object:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case list():
            return [_encodable(item) for item in value]
        case dict():
            return {_encodable(key): _encodable(item) for key, item in value.items()}
        case _:
            return value


def decode(line: bytes) -> Entry:
    """Return the entry on a line.

    Raises:
        NewerVersion: the line has a newer version than this one.
        ValueError: the line is not a record (torn, foreign, or with wrong types).
    """
    header = _header_decoder.decode(line)  # msgspec's errors are ValueErrors
    if header.v > VERSION:
        raise NewerVersion(header.v)
    decoder = _decoder_of(header.kind)
    record = decoder.decode(line) if decoder else None
    return Entry(id=header.id, time_s=header.time_s, kind=header.kind, record=record)
