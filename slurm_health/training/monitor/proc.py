# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of a process, by its directory in /proc. Each may raise OSError."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

_MOST_CHILDREN = 16
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def environ_of(process: Path) -> dict[str, str]:
    """Return the environment that a process was started with."""
    entries = (process / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def state_and_cpu(process: Path) -> tuple[str, float]:
    """Return the state of a process, one letter, and the CPU time of all its threads in seconds."""
    fields = stat_fields(process)
    return fields[0].decode(), (int(fields[11]) + int(fields[12])) * _TICK_S


def stat_fields(process: Path) -> list[bytes]:
    """Return the fields of proc(5) from the third on; the second may hold anything."""
    fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
    if len(fields) < 13:
        raise ValueError("no process")
    return fields


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
