# SPDX-License-Identifier: Apache-2.0
"""Owners of the directories of jobs, read in a child.

A user can mount a filesystem over a directory of theirs, for all users (FUSE's `allow_other`). One
that does not answer holds every process that reads it in the kernel; and one that answers may claim
to be root's. So a child reads the status, with a time limit, and a mounted filesystem is no
journal.
"""

from __future__ import annotations

import functools
import mmap
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from slurm_health.records.decoding import from_msgpack
from slurm_health.system.killable import Answered, Hung, run_one
from slurm_health.system.proc import mounted

# A directory takes microseconds; on a network filesystem that is new to this node, milliseconds.
_LIMIT_S = 5.0
_AT_ONCE = 1000
_MOST_TARGET = 255  # characters of a link: its target is a name in the same directory
_ANSWER_BYTES = 4 << 20
# After so many children without an answer the rest is left for the next time.
_MOST_HELD = 3
_NUMBER_BYTES = 8
_MOUNTED = "a filesystem is mounted there"


class PathStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of a path; `target` is that of a link.

    `trouble` is why the status is unknown, or not to be trusted; empty otherwise.
    """

    uid: int = -1
    mode: int = 0
    changed_s: float = 0.0
    target: str = ""
    trouble: str = ""

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory, not a link to one."""
        return stat.S_ISDIR(self.mode)


def statuses(paths: Sequence[Path], *, limit_s: float = _LIMIT_S) -> list[PathStatus | None]:
    """Return the status of every path, None for one that is not there.

    A path without an answer costs its time limit, and three are waited for; after the first, other
    mount points are not read.
    """
    known: dict[Path, PathStatus | None] = {}
    left, held = list(dict.fromkeys(paths)), 0
    with mmap.mmap(-1, _NUMBER_BYTES) as at:
        while left and held < _MOST_HELD:
            some = left[:_AT_ONCE]
            outcome = run_one(
                functools.partial(_encoded, some, at), limit_s, most_bytes=_ANSWER_BYTES
            )
            if isinstance(outcome, Answered):
                answers = from_msgpack(outcome.data, list[PathStatus | None])
                known.update(zip(some, answers, strict=True))
            else:
                held += 1
                points = mounted()
                known |= {
                    path: PathStatus(trouble=_MOUNTED) for path in left if str(path) in points
                }
                silent = some[int.from_bytes(at[:_NUMBER_BYTES], "little")]
                why = (
                    f"no answer within {outcome.limit_s:g} s"
                    if isinstance(outcome, Hung)
                    else f"it cannot be read: {outcome.reason}"
                )
                known[silent] = PathStatus(trouble=why)
            left = [path for path in left if path not in known]
    return [
        known.get(path, PathStatus(trouble="others of that filesystem did not answer"))
        for path in paths
    ]


def _encoded(paths: Sequence[Path], at: mmap.mmap) -> bytes:
    """Return the statuses, in the child, which leaves the number of the present path in `at`."""
    device_of = functools.cache(lambda directory: directory.stat().st_dev)
    answers = []
    for number, path in enumerate(paths):
        at[:_NUMBER_BYTES] = number.to_bytes(_NUMBER_BYTES, "little")
        answers.append(_status(path, device_of))
    return msgspec.msgpack.encode(answers)


def _status(path: Path, device_of: Callable[[Path], int]) -> PathStatus | None:
    try:
        status, device = path.lstat(), device_of(path.parent)
        target = str(path.readlink()) if stat.S_ISLNK(status.st_mode) else ""
    except FileNotFoundError:
        return None
    except OSError as err:
        return PathStatus(trouble=err.strerror or str(err))
    return PathStatus(
        uid=status.st_uid,
        mode=status.st_mode,
        changed_s=status.st_mtime,
        target=target if len(target) <= _MOST_TARGET and target.isprintable() else "",
        trouble=_MOUNTED if status.st_dev != device else "",
    )
