# SPDX-License-Identifier: Apache-2.0
"""A filesystem: mounted, of the right type, writable, not full in bytes or inodes, not hung."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from slurm_health.node.checks.check import (
    AbsolutePath,
    Check,
    CheckContext,
    NotApplicable,
    NotNegative,
    Percent,
)
from slurm_health.node.checks.external import ProgramRun, run_program
from slurm_health.node.rules.finding import (
    Finding,
    inconclusive,
    joined,
    node_fault,
    passed,
    user_fault,
    warned,
)
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import one_line
from slurm_health.system.proc import Mount, mount_of, mounts_in

_GIB = 1 << 30
# Errors of a broken or read-only filesystem. A refusal is none: where root is squashed, root may
# write nowhere and everything is well.
_BROKEN = (errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# What the mount table shows if an automounter has nothing mounted: it says nothing of the node.
_AUTOMOUNTER = "autofs"


class MountState(msgspec.Struct, frozen=True, kw_only=True):
    """One path's filesystem. `write_errno` is 0 if a file could be written there."""

    mounted: bool
    fstype: str = ""
    read_only: bool = False
    write_errno: int = 0
    total_bytes: int = 0
    available_bytes: int = 0
    total_inodes: int = 0
    free_inodes: int = 0


class Filesystem(Check, frozen=True, kw_only=True):
    """One filesystem. Asking it has an automounter mount it.

    One that hangs is inconclusive, since its server may be at fault; `hang_is_fault` says
    otherwise. So is an error of one that has a server: if it is down, no node is drained.
    """

    TOGETHER = True
    COMPONENTS = ("node", "storage")

    # What to check.
    path: AbsolutePath
    # The path must be a mount point.
    mounted: bool = True
    # Its type; empty: any.
    fstype: str = ""
    # Writes, syncs and removes a file. Read-only is a node fault, and so is an I/O error of a local
    # disk; a full filesystem is a user fault, a refusal (root squashed) inconclusive.
    writable: bool = False
    # It must be read-only.
    read_only: bool = False
    # Less is a node fault.
    min_total_gib: NotNegative = 0.0
    # Less is a user fault.
    min_available_percent: Percent = 0.0
    # Less is a user fault.
    min_free_inodes_percent: Percent = 0.0
    # Full is a node fault: for a local disk that no job can fill on every node.
    full_is_fault: bool = False

    def measure(self, machine: CheckContext) -> Finding:
        """Touch the filesystem, which an automounter may mount only then, and read the mounts."""
        path, point = machine.path(self.path), self.path.rstrip("/") or "/"
        trouble, status = "", None
        try:
            status = os.statvfs(path)
        except OSError as err:
            trouble = f"{self.path}: {err.strerror}"
        mounts = read_mounts(machine)
        if mount_of(mounts, point)[0] == _AUTOMOUNTER:
            raise Unmeasured(trouble or f"{self.path}: the automounter has mounted nothing there")
        fstype, options, _ = mounts.get(point, Mount("", ""))
        if not fstype and self.mounted:
            return self.judge(MountState(mounted=False))
        if status is None:
            raise Unmeasured(trouble)
        state = MountState(
            mounted=bool(fstype),
            fstype=fstype,
            read_only="ro" in options.split(",") or bool(status.f_flag & os.ST_RDONLY),
            write_errno=_write_errno(path) if self.writable else 0,
            total_bytes=status.f_blocks * status.f_frsize,
            available_bytes=status.f_bavail * status.f_frsize,
            total_inodes=status.f_files,
            free_inodes=status.f_favail,
        )
        return self.judge(state)

    def judge(self, state: MountState) -> Finding:
        """Not mounted, read-only or broken: the node's. Full: a user's, as a rule. Pure."""
        if self.mounted and not state.mounted:
            return node_fault(f"{self.path} is not mounted")
        return joined(list(self._parts(state)), well=f"{self.path} is fine")

    def _parts(self, state: MountState) -> Iterator[Finding]:
        full = node_fault if self.full_is_fault else user_fault
        if self.fstype and state.fstype != self.fstype:
            yield node_fault(f"{self.path} is {state.fstype}, expected {self.fstype}")
        if self.read_only is not state.read_only and (self.read_only or self.writable):
            word = "read-only" if state.read_only else "writable"
            yield node_fault(f"{self.path} is mounted {word}")
        total_gib = round(state.total_bytes / _GIB, 2)
        if total_gib < self.min_total_gib:
            text = f"{self.path} has {total_gib:g} GiB in total, limit {self.min_total_gib:g}"
            yield node_fault(text, total_gib=total_gib)
        gib = round(state.available_bytes / _GIB, 2)
        percent = _percent(state.available_bytes, state.total_bytes)
        yield passed("", available_gib=gib, available_percent=percent)
        if percent < self.min_available_percent:
            yield full(
                f"{self.path} has {percent:g} % left, limit {self.min_available_percent:g} %"
            )
        inodes = _percent(state.free_inodes, state.total_inodes)
        least = self.min_free_inodes_percent
        # Filesystems that make inodes as they go report none at all.
        if state.total_inodes and inodes < least:
            yield full(f"{self.path} has {inodes:g} % of its inodes left, limit {least:g} %")
        if state.write_errno:
            text = f"{self.path} cannot be written: {os.strerror(state.write_errno)}"
            local = not Mount(state.fstype, "").has_server
            broken = state.write_errno in (_BROKEN if local else (errno.EROFS,))
            is_full = state.write_errno in _FULL
            yield (node_fault if broken else full if is_full else inconclusive)(text)


# By type of filesystem: what prints the state of its client, and what it prints of a bad one.
_CLIENTS = {
    "lustre": ("lctl get_param *.*.import", r"target: \S+\s+state: (?!FULL|IDLE|NEW|CLOSED)\w+"),
    "gpfs": ("mmgetstate -Y", r"(?<=:)(?:arbitrating|down|unknown)(?=:)"),
    "beegfs": ("beegfs-check-servers", r"\S+ \[ID: \d+\]: UNREACHABLE"),
    "wekafs": ("weka local status", r"Containers: (?!(\d+)/\1 )\d+/\d+ running"),
}


class StorageClients(Check, frozen=True, kw_only=True):
    """Whether this node's clients of Lustre, GPFS, BeeGFS and WekaFS have their servers.

    By the programs that come with them. It warns: a server that is down looks the same on all
    nodes, and the [test of storage](../explanation/storage.md) in a job's check tells them apart.
    """

    CONTEXTS = ("healthcheck", "retest")

    def measure(self, machine: CheckContext) -> Finding:
        """Ask the clients of what is mounted."""
        mounted = {mount.kind for mount in read_mounts(machine).values()}
        kinds = [kind for kind in _CLIENTS if kind in mounted]
        if not kinds:
            raise NotApplicable("no Lustre, GPFS, BeeGFS or WekaFS is mounted")
        runs = [(kind, run_program(_CLIENTS[kind][0].split(), machine)) for kind in kinds]
        return joined([self.judge(*run) for run in runs], well="the clients have their servers")

    def judge(self, kind: str, run: ProgramRun) -> Finding:
        """Warn of each server that the client of a type lacks. Pure."""
        command, bad = _CLIENTS[kind]
        lacks = [warned(f"{kind}: {one_line(match[0])}") for match in re.finditer(bad, run.output)]
        answer = inconclusive(f"{command}: {run.first_line}") if run.code else passed("")
        return joined(lacks or [answer], well="")


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
