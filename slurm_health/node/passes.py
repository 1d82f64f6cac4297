# SPDX-License-Identifier: Apache-2.0
"""That this node has passed its own checks lately: said by root's hooks, read by everybody.

So a thousand short jobs do not have one node checked a thousand times. It says nothing of the
network between nodes. Whatever is not as it should be means that the node is checked: a file that
is missing, damaged or another's, another boot, another site's file or release, and a fault that was
seen since a check began.

Two files, each replaced whole, so that nobody has to wait for a lock: the passes, and when a fault
was last seen. A check that was under way when another hook saw a fault is no pass, though it ends
later.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec

from slurm_health import __version__
from slurm_health.node.rules.recovery import BootTime, uptime_s
from slurm_health.records.decoding import from_json
from slurm_health.system.private_files import is_own_directory, publish

ROOT = 0
_PASSES, _FAULT = "passes.json", "fault.json"
# A node of eight GPUs that are given away one by one, twice.
_MOST = 16
_MOST_BYTES = 1 << 16
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """All of these checks of this hook passed. `began` by the kernel's clock, which nobody sets.

    `expected`: what of the job's environment they went by; `by`: the site's file and the release.
    """

    hook: str
    checks: frozenset[str]
    began: BootTime
    by: str
    expected: dict[str, str] = {}


def site_mark(path: str) -> str:
    """Return what tells this site's file, and this release, from those of another time.

    Raises:
        OSError: there is no such file.
    """
    found = Path(path).stat()
    return f"{__version__} {found.st_dev}:{found.st_ino} {found.st_size} {found.st_ctime_ns}"


def add(directory: Path, passed: Pass) -> None:
    """Keep a pass; one of no check is none, and what cannot be kept is lost."""
    if not passed.checks:
        return
    with contextlib.suppress(OSError):
        # Others may enter root's directory, and list nothing there.
        directory.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        directory.parent.chmod(stat.S_IMODE(directory.parent.stat().st_mode) | 0o011)
        directory.mkdir(mode=0o755, exist_ok=True)
        if not is_own_directory(os.lstat(directory), os.geteuid()):
            return
        others = [
            each
            for each in _read(directory, os.geteuid())
            if each.began.boot == passed.began.boot
            and (each.hook, each.checks, each.expected)
            != (passed.hook, passed.checks, passed.expected)
        ]
        publish(directory / _PASSES, msgspec.json.encode([passed, *others][:_MOST]))


def revoke(directory: Path, now: BootTime | None) -> bool:
    """Have no check pass that began before now; tell whether that could be done.

    Where nothing was ever kept there is nothing to do.
    """
    if not os.path.lexists(directory):
        return True
    removed = _removed(directory / _PASSES)
    if now is None:
        return removed
    try:
        publish(directory / _FAULT, msgspec.json.encode(now))
    except OSError:
        return removed
    return True


def lately(
    directory: Path, now: BootTime | None, within_s: float, *, owner: int = ROOT
) -> list[Pass]:
    """Return the passes of this boot that are not older, and after which no fault was seen.

    `owner` is whose word it has to be.
    """
    if now is None or within_s <= 0:
        return []
    try:
        fault_s = _fault_s(directory, now, owner)
        return [
            each
            for each in _read(directory, owner)
            if each.checks
            and (began_s := uptime_s(each.began, now)) is not None
            and fault_s < began_s <= now.uptime_s <= began_s + within_s
        ]
    except (OSError, msgspec.MsgspecError):
        return []


def covers(found: Iterable[Pass], wanted: Pass) -> bool:
    """Tell whether one of these was of all the checks that are wanted, and went by the same."""
    return any(
        wanted.checks <= each.checks
        and (each.hook, each.expected, each.by) == (wanted.hook, wanted.expected, wanted.by)
        for each in found
    )


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def _fault_s(directory: Path, now: BootTime, owner: int) -> float:
    """Return when, of this boot, a fault was last seen.

    Raises:
        OSError: that cannot be read.
        msgspec.MsgspecError: nor be understood.
    """
    try:
        data = _content(directory / _FAULT, owner)
    except FileNotFoundError:
        return -1.0
    found = uptime_s(from_json(data, BootTime), now)
    return -1.0 if found is None else found


def _read(directory: Path, owner: int) -> list[Pass]:
    """Return what is kept in a directory that is its owner's alone; nothing where it is not."""
    if not is_own_directory(os.lstat(directory), owner):
        return []
    try:
        return from_json(_content(directory / _PASSES, owner), list[Pass])
    except (FileNotFoundError, msgspec.DecodeError):
        return []


def _content(path: Path, owner: int) -> bytes:
    """Return what a plain file holds that nobody but its owner can have written.

    Raises:
        OSError: there is none.
    """
    # O_NONBLOCK: a FIFO would wait for whoever writes.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        own = found.st_uid == owner and not found.st_mode & _OTHERS_WRITE
        if not own or not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path} is not user {owner}'s alone")
        return os.read(file, _MOST_BYTES)
    finally:
        os.close(file)
