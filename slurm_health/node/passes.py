# SPDX-License-Identifier: Apache-2.0
"""The passes of this node: root's hooks write them, every user may read them.

A node that has just passed its own checks is not checked again for every short job. A pass covers
this node alone, not the network between nodes. It does not count if its file is missing, damaged or
another user's, after a reboot, after a change of the config file or the release, or if a hook has
measured a fault since the check began.

Two files, replaced whole, so that no reader waits for a lock: the passes, and the time of the last
fault. A check that ran while another hook measured a fault is no pass, although it ended later.
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
    """A run of a hook in which every one of these checks passed.

    Args:
        hook: which hook.
        checks: their names.
        began: when, by the kernel's clock, which is never set.
        by: the fingerprint of the config file and the release.
        expected: variables of the job's environment that the checks depend on.
    """

    hook: str
    checks: frozenset[str]
    began: BootTime
    by: str
    expected: dict[str, str] = {}


def config_fingerprint(path: str) -> str:
    """Return a text that changes with the config file and with the release.

    Raises:
        OSError: there is no such file.
    """
    status = Path(path).stat()
    return f"{__version__} {status.st_dev}:{status.st_ino} {status.st_size} {status.st_ctime_ns}"


def add(directory: Path, passed: Pass) -> None:
    """Save a pass, unless it covers no check. A failure to write loses it."""
    if not passed.checks:
        return
    with contextlib.suppress(OSError):
        # Others may enter root's directory, and list nothing there.
        directory.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        directory.parent.chmod(stat.S_IMODE(directory.parent.stat().st_mode) | 0o011)
        directory.mkdir(mode=0o755, exist_ok=True)
        if not is_own_directory(os.lstat(directory), os.geteuid()):
            return
        key = (passed.hook, passed.checks, passed.expected)
        others = [
            other
            for other in _load(directory, os.geteuid())
            if other.began.boot == passed.began.boot
            and (other.hook, other.checks, other.expected) != key
        ]
        publish(directory / _PASSES, msgspec.json.encode([passed, *others][:_MOST]))


def revoke(directory: Path, now: BootTime | None) -> bool:
    """Revoke every pass of a check that began before now; return whether that worked.

    Without a directory there is nothing to revoke.
    """
    if not os.path.lexists(directory):
        return True
    try:
        (directory / _PASSES).unlink(missing_ok=True)
        removed = True
    except OSError:
        removed = False
    if now is None:
        return removed
    try:
        publish(directory / _FAULT, msgspec.json.encode(now))
    except OSError:
        return removed
    return True


def recent(
    directory: Path, now: BootTime | None, within_s: float, *, owner: int = ROOT
) -> list[Pass]:
    """Return the passes of this boot that are at most `within_s` old, with no fault since.

    Files of any user but `owner` do not count.
    """
    if now is None or within_s <= 0:
        return []
    fault_s = -1.0
    try:
        with contextlib.suppress(FileNotFoundError):
            fault = from_json(_read(directory / _FAULT, owner), BootTime)
            if (at_s := uptime_s(fault, now)) is not None:
                fault_s = at_s
        return [
            passed
            for passed in _load(directory, owner)
            if passed.checks
            and (began_s := uptime_s(passed.began, now)) is not None
            and fault_s < began_s <= now.uptime_s <= began_s + within_s
        ]
    except (OSError, msgspec.MsgspecError):
        return []


def covers(passes: Iterable[Pass], wanted: Pass) -> bool:
    """Return whether a pass covers all wanted checks, with the same environment and config file."""
    return any(
        wanted.checks <= passed.checks
        and (passed.hook, passed.expected, passed.by) == (wanted.hook, wanted.expected, wanted.by)
        for passed in passes
    )


def _load(directory: Path, owner: int) -> list[Pass]:
    """Return the passes in a directory that only its owner can change; none in any other."""
    if not is_own_directory(os.lstat(directory), owner):
        return []
    try:
        return from_json(_read(directory / _PASSES, owner), list[Pass])
    except (FileNotFoundError, msgspec.DecodeError):
        return []


def _read(path: Path, owner: int) -> bytes:
    """Return the content of a plain file that only its owner can have written.

    Raises:
        OSError: there is none.
    """
    # O_NONBLOCK: opening a FIFO would wait for its other end.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        own = status.st_uid == owner and not status.st_mode & _OTHERS_WRITE
        if not own or not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} can be changed by others than user {owner}")
        return os.read(file, _MOST_BYTES)
    finally:
        os.close(file)
