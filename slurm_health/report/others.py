# SPDX-License-Identifier: Apache-2.0
"""What root reads of another user's journal is read in a child: its memory and time have limits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from slurm_health.records.decoding import from_msgpack
from slurm_health.records.errors import JournalError
from slurm_health.records.text import cut, one_line
from slurm_health.system.killable import Answered, Broke, Hung, limit_memory, run_one

_READ_LIMIT_S = 60.0
# A check of 4,096 nodes over 100 rounds has some 100 MB, and takes 24 times that to be read.
_MEMORY_BYTES = 4 << 30
_ANSWER_BYTES = 128 << 20
_MOST_SAID = 160

T = TypeVar("T")


class NotRead(Exception):
    """It was not read within limits. The text says why."""


class _Refused(msgspec.Struct, frozen=True):
    """A JournalError, as it leaves the child."""

    path: str
    text: str


def read(directory: Path, work: Callable[[], T], kind: type[T]) -> T:
    """Return what `work` makes of a job's directory: in a child where that is another user's.

    Raises:
        JournalError: it cannot be read, or not within limits.
    """
    if owner_of(directory) == os.geteuid():
        return work()

    def told() -> bytes:
        try:
            return b"+" + msgspec.msgpack.encode(work())
        except JournalError as err:
            return b"-" + msgspec.msgpack.encode(_Refused(str(err.path), str(err)))

    try:
        said = within_limits(told, limit_s=_READ_LIMIT_S, memory_bytes=_MEMORY_BYTES)
    except NotRead as err:
        raise JournalError(directory, f"is another user's, and not read: {err}") from None
    if said[:1] == b"+":
        return from_msgpack(said[1:], kind)
    refused = from_msgpack(said[1:], _Refused)
    raise JournalError(Path(refused.path), refused.text.removeprefix(f"journal {refused.path}: "))


def owner_of(directory: Path) -> int:
    """Return whose a job's directory is, which may have been removed since it was found.

    Raises:
        JournalError: it is not there any more, or cannot be looked at.
    """
    try:
        return directory.lstat().st_uid
    except OSError as err:
        raise JournalError(directory, f"cannot be read: {err.strerror or err}") from err


def within_limits(
    work: Callable[[], bytes],
    *,
    limit_s: float,
    memory_bytes: int,
    most_bytes: int = _ANSWER_BYTES,
) -> bytes:
    """Return what `work` answers in a child.

    Raises:
        NotRead: it does not answer within limits.
    """

    def limited() -> bytes:
        limit_memory(memory_bytes)
        try:
            return work()
        except MemoryError:
            raise MemoryError(f"it takes more than {memory_bytes >> 30} GiB of memory") from None

    match run_one(limited, limit_s, most_bytes=most_bytes):
        case Answered(data=data):
            return data
        case Broke(reason=reason):
            raise NotRead(cut(one_line(reason), _MOST_SAID))
        case Hung():
            raise NotRead(f"not within {limit_s:.0f} s")
