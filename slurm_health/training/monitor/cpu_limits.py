# SPDX-License-Identifier: Apache-2.0
"""How long a CPU limit held back the cgroup of a process, in version 1 or 2 of cgroups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Of version 2 in microseconds, of version 1 in nanoseconds (Documentation/admin-guide/cgroup-v2.rst
# and Documentation/scheduler/sched-bwc.rst).
_UNITS_S = {b"throttled_usec": 1e-6, b"throttled_time": 1e-9}


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
