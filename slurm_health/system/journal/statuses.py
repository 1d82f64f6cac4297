# SPDX-License-Identifier: Apache-2.0
"""Whose the directories of jobs are, asked where no answer holds up who asks.

A user can mount a filesystem of their own over a directory of theirs, for all users (FUSE's
`allow_other`). One that does not answer holds whoever looks at it in the kernel; and one that
answers may say that it is root's. So a child looks, with a time limit, and what is mounted there is
nobody's journal.
"""

from __future__ import annotations

import functools
import mmap
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from slurm_health.records.decoding import from_msgpack
from slurm_health.system.killable import Answered, Broke, Hung, run_one
from slurm_health.system.proc import mounted

# A directory takes microseconds; on a network filesystem that is new to this node, milliseconds.
_LIMIT_S = 5.0
_AT_ONCE = 1000
_MOST_TARGET = 255  # characters of a link: what it is to name is a name
_ANSWER_BYTES = 4 << 20
# So many answers are waited for in vain before the rest is left for the next time.
_MOST_HELD = 3
_NUMBER_BYTES = 8
_MOUNTED = "a filesystem is mounted there"


class PathStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a path is; `target` is that of a link.

    `trouble` says why that is not known, or not to be believed; it is empty otherwise.
    """

    uid: int = -1
    mode: int = 0
    changed_s: float = 0.0
    target: str = ""
    trouble: str = ""

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory, and no link to one."""
        return stat.S_ISDIR(self.mode)


def statuses(paths: Sequence[Path], *, limit_s: float = _LIMIT_S) -> list[PathStatus | None]:
    """Return what each path is, None for one that is not there (any more).

    Of what does not answer, each costs its time limit, and three are waited for; what else is
    mounted is not asked after the first.
    """
    found: dict[Path, PathStatus | None] = {}
    left, held = list(dict.fromkeys(paths)), 0
    with mmap.mmap(-1, _NUMBER_BYTES) as at:
        while left and held < _MOST_HELD:
            some = left[:_AT_ONCE]
            outcome = run_one(
                functools.partial(_encoded, some, at), limit_s, most_bytes=_ANSWER_BYTES
            )
            if isinstance(outcome, Answered):
                looks = from_msgpack(outcome.data, list[PathStatus | None])
                found.update(zip(some, looks, strict=True))
            else:
                held += 1
                points = mounted()
                found |= {
                    each: PathStatus(trouble=_MOUNTED) for each in left if str(each) in points
                }
                silent = some[int.from_bytes(at[:_NUMBER_BYTES], "little")]
                found[silent] = PathStatus(trouble=_why(outcome))
            left = [each for each in left if each not in found]
    return [
        found.get(each, PathStatus(trouble="others of that filesystem did not answer"))
        for each in paths
    ]


def _why(outcome: Broke | Hung) -> str:
    if isinstance(outcome, Hung):
        return f"no answer within {outcome.limit_s:g} s"
    return f"it cannot be looked at: {outcome.reason}"


def _encoded(paths: Sequence[Path], at: mmap.mmap) -> bytes:
    """Be the child: look at each, and say beforehand which it is."""
    device_of = functools.cache(lambda directory: directory.stat().st_dev)
    looks = []
    for number, path in enumerate(paths):
        at[:_NUMBER_BYTES] = number.to_bytes(_NUMBER_BYTES, "little")
        looks.append(_look(path, device_of))
    return msgspec.msgpack.encode(looks)


def _look(path: Path, device_of: Callable[[Path], int]) -> PathStatus | None:
    try:
        found, device = path.lstat(), device_of(path.parent)
        target = str(path.readlink()) if stat.S_ISLNK(found.st_mode) else ""
    except FileNotFoundError:
        return None
    except OSError as err:
        return PathStatus(trouble=err.strerror or str(err))
    return PathStatus(
        uid=found.st_uid,
        mode=found.st_mode,
        changed_s=found.st_mtime,
        target=target if len(target) <= _MOST_TARGET and target.isprintable() else "",
        trouble=_MOUNTED if found.st_dev != device else "",
    )
