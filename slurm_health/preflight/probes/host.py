# SPDX-License-Identifier: Apache-2.0
"""What a node computes with where it has no accelerator: its processors and their memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def model(threads: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return what nodes must share to be compared: the processors' model, and how many are used."""
    return f"{_cpu_model(cpuinfo)} with {threads} thread{'s' if threads != 1 else ''}"


def memory_bytes() -> tuple[int, int]:
    """Return the free and the total memory of this machine; 0 where it cannot be told."""
    try:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes
    except (OSError, ValueError):
        return 0, 0


def numa_nodes(root: Path = _NODES) -> dict[int, set[int]]:
    """Return the memory nodes of which this process may use processors, with these processors.

    One node with all of them where the kernel tells of none.
    """
    allowed = os.sched_getaffinity(0)
    found = {}
    for place in root.glob("node[0-9]*"):
        try:
            processors = _numbers((place / "cpulist").read_text()) & allowed
        except OSError:
            continue
        if processors:
            found[int(place.name[len("node") :])] = processors
    return dict(sorted(found.items())) or {0: allowed}


@contextlib.contextmanager
def only_on(processors: set[int]) -> Iterator[None]:
    """Have this thread run on these processors, where it first touches memory that is theirs."""
    before = os.sched_getaffinity(0)
    try:
        with contextlib.suppress(OSError):  # taken from the job meanwhile
            os.sched_setaffinity(0, processors)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def _numbers(ranges: str) -> set[int]:
    """Return the numbers of a list of the kernel's: `0-3,8-11`."""
    found: set[int] = set()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _cpu_model(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "cpu"
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else "cpu"
