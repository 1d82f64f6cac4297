# SPDX-License-Identifier: Apache-2.0
"""The few kernel calls which Python 3.11 does not offer."""

import ctypes
import os
from pathlib import Path

NEW_MOUNT, NEW_UTS, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_PID, NEW_NET = 0x20000000, 0x40000000

_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_DETACH = 2
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")


def unshare(flags: int) -> None:
    """Leave the parent's namespaces of these kinds for new ones."""
    _check(_libc.unshare(flags), f"unshare {flags:#x}")


def die_with_parent(signum: int) -> None:
    """Have the kernel send this signal to this process when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0), "prctl PR_SET_PDEATHSIG")


def _mount(source: str, target: Path, fstype: str, flags: int, options: str) -> None:
    result = _libc.mount(
        source.encode(),
        str(target).encode(),
        fstype.encode(),
        ctypes.c_ulong(flags),
        options.encode(),
    )
    _check(result, f"mount {fstype or source} on {target}")


def mount_fresh(fstype: str, target: Path, options: str = "") -> None:
    """Mount a new filesystem of this type (proc, sysfs, tmpfs) over the target."""
    _mount(fstype, target, fstype, 0, options)


def bind(source: Path, target: Path) -> None:
    """Make the source, and what is mounted below it, visible at the target too."""
    _mount(str(source), target, "", _BIND | _RECURSIVE, "")


def mount_overlay(lower: Path, upper: Path, work: Path, target: Path) -> None:
    """Show `lower` at the target; changes go to `upper`."""
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    _mount("overlay", target, "overlay", 0, options)


def change_root(root: Path) -> None:
    """Make this mount point the root of the mount namespace, and let go of the old root."""
    os.chdir(root)
    # The old root ends up on top of the new one, and is taken away from there.
    _check(_libc.pivot_root(b".", b"."), f"pivot_root {root}")
    unmount(Path())
    os.chdir("/")


def keep_mounts_private() -> None:
    """Let no mount of this namespace reach another, nor the other way round."""
    _mount("none", Path("/"), "", _RECURSIVE | _PRIVATE, "")


def unmount(target: Path) -> None:
    """Take this mount, and those below it, out of this namespace."""
    _check(_libc.umount2(str(target).encode(), _DETACH), f"unmount {target}")
