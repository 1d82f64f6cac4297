# SPDX-License-Identifier: Apache-2.0
"""A DDP training on CPUs with even, short steps, whose times the first rank prints at its end.

Started once per task by srun: `steady_training.py SECONDS SKIP_S`. What the first SKIP_S seconds
showed is left out: the monitor begins in them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slurm_health import heartbeat

_WIDTH = 256
_PAUSE_S = 0.05  # three ranks and their monitors share the machine


def main(seconds: float, skip_s: float) -> None:
    """Train for so long; print the median time of a step, in ms."""
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    model = DistributedDataParallel(torch.nn.Linear(_WIDTH, _WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began_s = time.monotonic()
    times_ms = []
    over = torch.zeros(1)
    step = 0
    while not over.item():
        step_s = time.monotonic()
        loss = model(torch.ones(64, _WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        heartbeat.step(step)
        if step_s - began_s > skip_s:
            times_ms.append(1e3 * (time.monotonic() - step_s))
        over[0] = float(time.monotonic() - began_s > seconds)
        dist.all_reduce(over)
        time.sleep(_PAUSE_S)
        step += 1
    if dist.get_rank() == 0:
        median_ms = statistics.median(times_ms)
        print(json.dumps({"median_ms": median_ms, "steps": len(times_ms)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
