# SPDX-License-Identifier: Apache-2.0
"""A process group, formed and left again and again: `cycles RANK RANKS FILE CYCLES DEVICES`."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.on_device.events import Events
from slurm_health.preflight.probes import torch_device as devices_of

BYTES_PER_RANK = 4 << 20
_LIMIT = timedelta(seconds=120)


def main() -> None:
    """Say after each cycle what it took and what the process holds by then."""
    rank, ranks, file, cycles, devices = sys.argv[1:]
    events = Events()
    device = devices_of.claim(0, expected=int(devices), environ=os.environ).raw
    store = dist.FileStore(file, int(ranks))
    for index in range(int(cycles)):
        taken = _cycle(device, dist.PrefixStore(str(index), store), int(rank), int(ranks))
        events.say(**taken, **_held(device))


def _cycle(device: torch.device, store: dist.Store, rank: int, ranks: int) -> dict[str, float]:
    mine = torch.ones(BYTES_PER_RANK // 4, device=device)
    whole = [torch.empty_like(mine) for _ in range(ranks)]
    moments = [time.perf_counter()]

    def mark() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        moments.append(time.perf_counter())

    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=_LIMIT,
    )
    mark()
    for _ in range(2):  # NCCL connects in the first
        dist.all_gather(whole, mine)
        mark()
    dist.destroy_process_group()
    mark()
    names = ("init_s", "first_s", "second_s", "destroy_s")
    return {name: end - begin for name, begin, end in zip(names, moments, moments[1:])}  # noqa: B905 - older Pythons run this


def _held(device: torch.device) -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    free_bytes, total_bytes = devices_of.memory_bytes(device)
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "device_bytes": total_bytes - free_bytes if device.type == "cuda" else 0,
    }


if __name__ == "__main__":
    main()
