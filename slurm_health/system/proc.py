# SPDX-License-Identifier: Apache-2.0
"""Processes and mounts, from /proc.

Functions of a process may raise OSError.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec

_MOST_CHILDREN = 16
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# Of version 2 in microseconds, of version 1 in nanoseconds (Documentation/admin-guide/cgroup-v2.rst
# and Documentation/scheduler/sched-bwc.rst).
_UNITS_S = {b"throttled_usec": 1e-6, b"throttled_time": 1e-9}
MOUNTS = Path("/proc/self/mounts")
_FEWEST_FIELDS = 4  # device, point, type, options
_OCTAL = re.compile(r"\\([0-7]{3})")  # proc(5): of blanks, line ends and backslashes
_OF_A_USER = re.compile(r"(?:^|,)user_id=[1-9]")


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """/proc/PID/stat. With `start_ticks` a process differs from a later one of the same number.

    `cpu_s` is the time of all its threads, in user mode and in the kernel.
    """

    pid: int
    name: str
    state: str
    parent: int
    group: int
    cpu_s: float
    start_ticks: int


def stat(process: Path) -> Stat:
    """Read /proc/PID/stat of a process.

    Raises:
        ValueError: it cannot be read; a process that ends may leave an empty file.
    """
    return parse_stat((process / "stat").read_text(errors="replace"))


def parse_stat(text: str) -> Stat:
    """Parse the line. The name in it may hold spaces and brackets of its own; see proc(5).

    Raises:
        ValueError: it is not such a line.
    """
    head, _, tail = text.rpartition(")")
    pid, _, name = head.partition(" (")
    words = tail.split()  # from the third field on
    if len(words) < 20:
        raise ValueError("no process")
    return Stat(
        pid=int(pid),
        name=name,
        state=words[0],
        parent=int(words[1]),
        group=int(words[2]),
        cpu_s=(int(words[11]) + int(words[12])) * _TICK_S,
        start_ticks=int(words[19]),
    )


def own_memory_bytes() -> int:
    """Return the address space of this process, which is what RLIMIT_AS limits."""
    pages = int(Path("/proc/self/statm").read_text().partition(" ")[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ancestors() -> Iterator[Stat]:
    """Yield this process, its parent, and so on, as far as /proc shows them."""
    pid = os.getpid()
    while pid:
        try:
            process = stat(Path(f"/proc/{pid}"))
        except (OSError, ValueError):
            return
        yield process
        pid = process.parent


def environ_of(process: Path) -> dict[str, str]:
    """Return the environment that a process was started with."""
    entries = (process / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def io_bytes(process: Path) -> int:
    """Return the bytes that a process read and wrote; 0 if the kernel does not count them."""
    try:
        lines = (process / "io").read_bytes().splitlines()
    except PermissionError:
        return 0
    return sum(int(line.split()[1]) for line in lines[:2])


def scheduled(process: Path) -> tuple[float, float]:
    """Return how long the main thread ran, and waited for a processor, in seconds.

    Both are 0 if the kernel does not count it (Documentation/scheduler/sched-stats.rst).
    """
    try:
        ran_ns, unserved_ns, _ = map(int, (process / "schedstat").read_bytes().split())
    except (FileNotFoundError, PermissionError, ValueError):
        return 0.0, 0.0
    return ran_ns / 1e9, unserved_ns / 1e9


def children(process: Path) -> Iterator[Path]:
    """Yield the children of a process' main thread; none if the kernel does not list them."""
    with contextlib.suppress(OSError):
        for pid in (process / "task" / process.name / "children").read_text().split():
            yield process.parent / pid


def voluntary_switches(process: Path) -> int:
    """Return how often the main thread went to sleep in the kernel, 0 if it is not counted."""
    for line in (process / "status").read_bytes().splitlines():
        name, _, number = line.partition(b":")
        if name == b"voluntary_ctxt_switches":
            return int(number)
    return 0


def kernel_waits(root: Path, pid: int, children: Sequence[int]) -> str:
    """Return the functions of the kernel in which a process and its children wait."""
    waits = []
    for process in (pid, *children[:_MOST_CHILDREN]):
        with contextlib.suppress(OSError):
            function = (root / str(process) / "wchan").read_text().strip()
            if function not in {"", "0"}:
                waits.append(function if process == pid else f"child {function}")
    return ", ".join(dict.fromkeys(waits))[:200]


def remote_file(root: Path, pid: int, children: Sequence[int], mounts: Mapping[str, Mount]) -> str:
    """Return an open file of a process or of its children that is on a mount with a server.

    It is the file that a process reads or writes, where the kernel shows it, else the last opened;
    with its server: `/ckpt/a.pt (srv:/ckpt)`. Neither is looked at: they may hang.
    """
    for process in (root / str(number) for number in (pid, *children[:_MOST_CHILDREN])):
        with contextlib.suppress(OSError, ValueError):
            numbers = sorted((int(name) for name in os.listdir(process / "fd")), reverse=True)  # noqa: PTH208 - text
            with contextlib.suppress(OSError, ValueError, IndexError):  # it runs, or it is secret
                numbers.insert(0, int((process / "syscall").read_text().split()[1], 16))
            for number in numbers:
                with contextlib.suppress(OSError):
                    path = os.readlink(process / "fd" / str(number))  # noqa: PTH115 - text
                    mount = mount_of(mounts, path)
                    if path.startswith("/") and mount.has_server:
                        return f"{path} ({mount.source})"
    return ""


class CpuLimits:
    """Reads for how long CPU limits held a process back: of its cgroup and of those above it."""

    def __init__(self, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
        # Whether of version 2, the root of the mount among the cgroups, and the mount point.
        self._mounts: list[tuple[bool, PurePosixPath, Path]] = []
        with contextlib.suppress(OSError, ValueError):
            for line in mountinfo.read_text().splitlines():
                mounted, _, filesystem = line.partition(" - ")
                root, mount = mounted.split()[3:5]
                kind, _, options = filesystem.split(" ", 2)
                if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
                    self._mounts.append((kind == "cgroup2", PurePosixPath(root), Path(mount)))

    def throttled_s(self, process: Path) -> float:
        """Return the seconds; 0 without a limit, or if the kernel does not count them."""
        longest_s = 0.0
        with contextlib.suppress(OSError, ValueError):
            for line in (process / "cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if controllers and "cpu" not in controllers.split(","):
                    continue
                for unified, root, mount in self._mounts:
                    if unified is (not controllers) and PurePosixPath(path).is_relative_to(root):
                        own = mount / PurePosixPath(path).relative_to(root)
                        above = [place for place in own.parents if place.is_relative_to(mount)]
                        longest_s = max(longest_s, *map(_throttled_s, (own, *above)))
        return longest_s


def _throttled_s(directory: Path) -> float:
    with contextlib.suppress(FileNotFoundError):  # a root has none
        for line in (directory / "cpu.stat").read_bytes().splitlines():
            name, _, number = line.partition(b" ")
            if name in _UNITS_S:
                return int(number) * _UNITS_S[name]
    return 0.0


# Filesystems whose files are on other machines; those over FUSE are `fuse.NAME`.
_OF_SERVERS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "wekafs", "ceph", "cifs", "smb3", "panfs"}
    | {"orangefs", "afs", "9p", "virtiofs"}
)


class Mount(NamedTuple):
    """The filesystem on a mount point; `source` is a device or a server."""

    kind: str
    options: str
    source: str = ""

    @property
    def has_server(self) -> bool:
        """Whether its files are on other machines, or may be."""
        return self.kind in _OF_SERVERS or self.kind.startswith("fuse.")


def mounts_in(text: str) -> dict[str, Mount]:
    """Return the mounts by point, from the text of /proc/self/mounts.

    The last mount on a point is the one in use.
    """
    mounts = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= _FEWEST_FIELDS:
            point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), words[1])
            mounts[point] = Mount(kind=words[2], options=words[3], source=words[0])
    return mounts


def mount_of(mounts: Mapping[str, Mount], path: str) -> Mount:
    """Return the mount that a path lies on; type and options are empty without one."""
    above = (path, *map(str, PurePosixPath(path).parents))
    return next((mounts[place] for place in above if place in mounts), Mount("", ""))


def mounted(mounts: Path = MOUNTS) -> dict[str, Mount]:
    """Return the mounts of this machine, none if they cannot be read."""
    with contextlib.suppress(OSError):
        return mounts_in(mounts.read_text(errors="surrogateescape"))
    return {}


def mounted_by_users(root: Path, mounts: Path = MOUNTS) -> frozenset[str]:
    """Return the clusters, `lab`, and the jobs, `lab/12`, with a user's filesystem in them.

    With FUSE any user may mount a filesystem on a directory of their own. It refuses other users,
    or lets them wait for its owner's answer.
    """
    points = [
        point
        for point, (kind, options, _) in mounted(mounts).items()
        if kind.startswith("fuse") and _OF_A_USER.search(options)
    ]
    if not points:
        return frozenset()
    above = os.path.realpath(root) + "/"
    below = [point.removeprefix(above) for point in points if point.startswith(above)]
    return frozenset("/".join(path.split("/")[:2]) for path in below)
