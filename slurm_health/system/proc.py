# SPDX-License-Identifier: Apache-2.0
"""What the kernel says: of a process, by its directory in /proc, and of what is mounted where.

What asks of a process may raise OSError.
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
    """/proc/PID/stat. `start_ticks` tells a process from a later one of the same number.

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
    """Read what is said in one line of a process.

    Raises:
        ValueError: it is not such a line; a process that ends may leave an empty one.
    """
    return parse_stat((process / "stat").read_text(errors="replace"))


def parse_stat(text: str) -> Stat:
    """Read the line. The name in it may hold spaces and brackets of its own; see proc(5).

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
    """Yield this process, its parent, and so on. Ends where /proc shows no more."""
    pid = os.getpid()
    while pid:
        try:
            found = stat(Path(f"/proc/{pid}"))
        except (OSError, ValueError):
            return
        yield found
        pid = found.parent


def environ_of(process: Path) -> dict[str, str]:
    """Return the environment that a process was started with."""
    entries = (process / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def io_bytes(process: Path) -> int:
    """Return what a process read and wrote; 0 where the kernel does not count it."""
    try:
        lines = (process / "io").read_bytes().splitlines()
    except PermissionError:
        return 0
    return sum(int(line.split()[1]) for line in lines[:2])


def scheduled(process: Path) -> tuple[float, float]:
    """Return how long the main thread ran, and was ready to without a processor, in seconds.

    Both are 0 where the kernel does not count it (Documentation/scheduler/sched-stats.rst).
    """
    try:
        ran_ns, unserved_ns, _ = map(int, (process / "schedstat").read_bytes().split())
    except (FileNotFoundError, PermissionError, ValueError):
        return 0.0, 0.0
    return ran_ns / 1e9, unserved_ns / 1e9


def children(process: Path) -> Iterator[Path]:
    """Yield what the main thread of a process has started; nothing where the kernel tells none."""
    with contextlib.suppress(OSError):
        for pid in (process / "task" / process.name / "children").read_text().split():
            yield process.parent / pid


def voluntary_switches(process: Path) -> int:
    """Return how often the main thread has gone to wait in the kernel, 0 where that is not told."""
    for line in (process / "status").read_bytes().splitlines():
        name, _, number = line.partition(b":")
        if name == b"voluntary_ctxt_switches":
            return int(number)
    return 0


def kernel_waits(root: Path, pid: int, children: Sequence[int]) -> str:
    """Return the functions of the kernel in which a process and its children wait."""
    said = []
    for each in (pid, *children[:_MOST_CHILDREN]):
        with contextlib.suppress(OSError):
            where = (root / str(each) / "wchan").read_text().strip()
            if where not in {"", "0"}:
                said.append(where if each == pid else f"child {where}")
    return ", ".join(dict.fromkeys(said))[:200]


class CpuLimits:
    """Reads what the limits of a process's cgroup, and of those above it, have cost so far."""

    def __init__(self, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
        self._mounts = list(_mounts(mountinfo))

    def throttled_s(self, process: Path) -> float:
        """Return the seconds, 0 where the process has no limit or that is not told."""
        with contextlib.suppress(OSError, ValueError):
            return max(map(_throttled_s, self._directories(process)), default=0.0)
        return 0.0

    def _directories(self, process: Path) -> Iterator[Path]:
        """Yield its cgroup and those above it, as they are mounted here."""
        for line in (process / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            for unified, root, mount in self._mounts:
                inside = PurePosixPath(path).is_relative_to(root)
                if unified is (not controllers) and inside:
                    own = mount / PurePosixPath(path).relative_to(root)
                    yield from (own, *(each for each in own.parents if each.is_relative_to(mount)))


def _mounts(mountinfo: Path) -> Iterator[tuple[bool, PurePosixPath, Path]]:
    """Yield where cgroups are mounted: whether of version 2, from which one on, and where."""
    with contextlib.suppress(OSError, ValueError):
        for line in mountinfo.read_text().splitlines():
            mounted, _, filesystem = line.partition(" - ")
            root, mount = mounted.split()[3:5]
            kind, _, options = filesystem.split(" ", 2)
            if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
                yield kind == "cgroup2", PurePosixPath(root), Path(mount)


def _throttled_s(directory: Path) -> float:
    with contextlib.suppress(FileNotFoundError):  # a root has none
        for line in (directory / "cpu.stat").read_bytes().splitlines():
            name, _, number = line.partition(b" ")
            if name in _UNITS_S:
                return int(number) * _UNITS_S[name]
    return 0.0


class Mount(NamedTuple):
    """What is mounted on a point."""

    kind: str
    options: str


def mounts_in(text: str) -> dict[str, Mount]:
    """Return what is mounted, by point; the last mount on a point is the one in use.

    `text` is that of /proc/self/mounts.
    """
    mounts = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= _FEWEST_FIELDS:
            point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), words[1])
            mounts[point] = Mount(kind=words[2], options=words[3])
    return mounts


def mount_of(mounts: Mapping[str, Mount], path: str) -> Mount:
    """Return the mount that a path lies on; type and options are empty where there is none."""
    above = (path, *map(str, PurePosixPath(path).parents))
    return next((mounts[each] for each in above if each in mounts), Mount("", ""))


def mounted(mounts: Path = MOUNTS) -> dict[str, Mount]:
    """Return what is mounted here, nothing where the kernel does not tell."""
    with contextlib.suppress(OSError):
        return mounts_in(mounts.read_text(errors="surrogateescape"))
    return {}


def mounted_by_users(root: Path, mounts: Path = MOUNTS) -> frozenset[str]:
    """Return the clusters, `lab`, and the jobs, `lab/12`, with a user's filesystem in them.

    With FUSE any user may mount something on a directory of their own. Whoever asks such a
    filesystem is refused, or waits for its owner's answer.
    """
    points = [
        point
        for point, (kind, options) in mounted(mounts).items()
        if kind.startswith("fuse") and _OF_A_USER.search(options)
    ]
    if not points:
        return frozenset()
    above = os.path.realpath(root) + "/"
    below = [each.removeprefix(above) for each in points if each.startswith(above)]
    return frozenset("/".join(each.split("/")[:2]) for each in below)
