# SPDX-License-Identifier: Apache-2.0
"""What is slow the first time: `first_use RANK RANKS FILE DEVICES`."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

from benchmarks.gpu.on_device.events import Events

_LIMIT = timedelta(seconds=120)
_SIZE = 1024


def main() -> None:
    """Say how long each first use took, and the second use of what is used again."""
    rank, ranks, file, devices = sys.argv[1:]
    events = Events()
    moments = [time.perf_counter()]

    def lap_s() -> float:
        moments.append(time.perf_counter())
        return moments[-1] - moments[-2]

    import torch
    import torch.distributed as dist

    from slurm_health.preflight.probes import torch_device as devices_of

    taken = {"import": lap_s()}
    device = devices_of.claim(0, expected=int(devices), environ=os.environ).raw
    square = torch.ones(_SIZE, _SIZE, device=device).to(
        devices_of.half_precision(device) if device.type == "cuda" else torch.float32
    )
    float(square[0, 0])  # waits for the device
    taken["context"] = lap_s()
    for name in ("first product", "second product"):
        float(torch.mm(square, square)[0, 0])
        taken[name] = lap_s()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(file, int(ranks)),
        rank=int(rank),
        world_size=int(ranks),
        timeout=_LIMIT,
    )
    taken["process group"] = lap_s()
    for name in ("first collective", "second collective"):
        dist.all_reduce(square)
        float(square[0, 0])
        taken[name] = lap_s()
    dist.destroy_process_group()
    events.say(**taken)


if __name__ == "__main__":
    main()
