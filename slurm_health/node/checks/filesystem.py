# SPDX-License-Identifier: Apache-2.0
"""A filesystem: mounted, of the right type, writable, not full in bytes or inodes, not hung."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from slurm_health.node.checks.check import (
    AbsolutePath,
    Check,
    CheckContext,
    NotNegative,
    Percent,
    Seen,
    Unmeasured,
)
from slurm_health.node.rules.finding import (
    Finding,
    inconclusive,
    joined,
    node_fault,
    passed,
    user_fault,
)
from slurm_health.system.proc import Mount, mount_of, mounts_in

_GIB = 1 << 30
# What a broken or read-only filesystem says. A refusal is none of it: where root is squashed, root
# may write nowhere and everything is well.
_BROKEN = (errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# What the mount table shows where an automounter has nothing mounted: it says nothing of the node.
_AUTOMOUNTER = "autofs"


class FilesystemSeen(Seen, frozen=True, kw_only=True):
    """One path's filesystem. `write_errno` is 0 when a file could be written there."""

    mounted: bool
    fstype: str = ""
    read_only: bool = False
    write_errno: int = 0
    total_bytes: int = 0
    available_bytes: int = 0
    total_inodes: int = 0
    free_inodes: int = 0


class Filesystem(Check, frozen=True, kw_only=True):
    """One filesystem. A hung one is caught by the time limit, as every check is."""

    SEEN = FilesystemSeen
    TOGETHER = True
    COMPONENTS = ("node", "storage")

    path: AbsolutePath
    # The path must be a mount point, not a directory of what lies below it.
    mounted: bool = True
    fstype: str = ""
    # A file is written, synced and removed.
    writable: bool = False
    read_only: bool = False
    min_total_gib: NotNegative = 0.0
    min_available_gib: NotNegative = 0.0
    min_available_percent: Percent = 0.0
    min_free_inodes_percent: Percent = 0.0
    # Full is the node's fault: for one that nobody else fills.
    full_is_fault: bool = False

    def collect(self, machine: CheckContext) -> FilesystemSeen:
        """Touch the filesystem, which an automounter may mount only then, and read the mounts."""
        path, point = machine.path(self.path), self.path.rstrip("/") or "/"
        trouble, found = "", None
        try:
            found = os.statvfs(path)
        except OSError as err:
            trouble = f"{self.path}: {err.strerror}"
        mounts = read_mounts(machine)
        if mount_of(mounts, point)[0] == _AUTOMOUNTER:
            raise Unmeasured(trouble or f"{self.path}: the automounter has mounted nothing there")
        fstype, options = mounts.get(point, ("", ""))
        if not fstype and self.mounted:
            return FilesystemSeen(mounted=False)
        if found is None:
            raise Unmeasured(trouble)
        return FilesystemSeen(
            mounted=bool(fstype),
            fstype=fstype,
            read_only="ro" in options.split(",") or bool(found.f_flag & os.ST_RDONLY),
            write_errno=_write_errno(path) if self.writable else 0,
            total_bytes=found.f_blocks * found.f_frsize,
            available_bytes=found.f_bavail * found.f_frsize,
            total_inodes=found.f_files,
            free_inodes=found.f_favail,
        )

    def judge(self, seen: FilesystemSeen) -> Finding:
        """Not mounted, read-only or broken: the node's. Full: whoever filled it, as a rule."""
        if self.mounted and not seen.mounted:
            return node_fault(f"{self.path} is not mounted")
        parts = [*self._kind(seen), *self._room(seen)]
        if seen.write_errno:
            parts.append(self._unwritable(seen.write_errno))
        return joined(parts, well=f"{self.path} is fine")

    def _unwritable(self, number: int) -> Finding:
        text = f"{self.path} cannot be written: {os.strerror(number)}"
        if number in _BROKEN:
            return node_fault(text)
        return self._full(text) if number in _FULL else inconclusive(text)

    def _full(self, text: str) -> Finding:
        return node_fault(text) if self.full_is_fault else user_fault(text)

    def _kind(self, seen: FilesystemSeen) -> list[Finding]:
        found = []
        if self.fstype and seen.fstype != self.fstype:
            found.append(node_fault(f"{self.path} is {seen.fstype}, expected {self.fstype}"))
        if self.read_only is not seen.read_only and (self.read_only or self.writable):
            state = "read-only" if seen.read_only else "writable"
            found.append(node_fault(f"{self.path} is mounted {state}"))
        total_gib = round(seen.total_bytes / _GIB, 2)
        if total_gib < self.min_total_gib:
            text = f"{self.path} has {total_gib:g} GiB in total, limit {self.min_total_gib:g}"
            found.append(node_fault(text, total_gib=total_gib))
        return found

    def _room(self, seen: FilesystemSeen) -> list[Finding]:
        available_gib = round(seen.available_bytes / _GIB, 2)
        free = _percent(seen.available_bytes, seen.total_bytes)
        inodes = _percent(seen.free_inodes, seen.total_inodes)
        found = [passed("room", available_gib=available_gib, available_percent=free)]
        if available_gib < self.min_available_gib:
            text = f"{self.path} has {available_gib:g} GiB left, limit {self.min_available_gib:g}"
            found.append(self._full(text))
        if free < self.min_available_percent:
            text = f"{self.path} has {free:g} % left, limit {self.min_available_percent:g} %"
            found.append(self._full(text))
        # Filesystems that make inodes as they go report none at all.
        if seen.total_inodes and inodes < self.min_free_inodes_percent:
            limit = self.min_free_inodes_percent
            found.append(
                self._full(f"{self.path} has {inodes:g} % of its inodes left, limit {limit:g} %")
            )
        return found


def read_mounts(machine: CheckContext) -> dict[str, Mount]:
    """Return the mounts of a machine, as `mounts_in` does."""
    return mounts_in(machine.read("/proc/self/mounts"))


def _write_errno(directory: Path) -> int:
    """Write and remove a file; return the error, 0 for none."""
    # The name cannot be guessed, and a link that a user laid there is not followed.
    path = directory / f".slurm-health.{os.urandom(8).hex()}"
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    except OSError as err:
        return err.errno or errno.EIO
    try:
        os.write(file, b"slurm-health\n")
        os.fsync(file)
    except OSError as err:
        return err.errno or errno.EIO
    finally:
        os.close(file)
        with contextlib.suppress(OSError):
            path.unlink()
    return 0


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1) if whole else 100.0
