# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a process, by its directory in /proc. Each may raise OSError."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

_MOST_CHILDREN = 16
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


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


def kernel_waits(root: Path, pid: int, children: Sequence[int]) -> str:
    """Return the functions of the kernel in which a process and its children wait."""
    said = []
    for each in (pid, *children[:_MOST_CHILDREN]):
        with contextlib.suppress(OSError):
            where = (root / str(each) / "wchan").read_text().strip()
            if where not in {"", "0"}:
                said.append(where if each == pid else f"child {where}")
    return ", ".join(dict.fromkeys(said))[:200]
