# SPDX-License-Identifier: Apache-2.0
"""A healthy DDP training on CPUs whose steps are uneven: what the monitor is to be silent about.

Started once per task by srun: `uneven_training.py DIRECTORY MINUTES SEED`. Steps take from a tenth
of a second to some seconds. Every 50 steps the first rank writes a checkpoint for up to a minute
and a half while the others wait for it; every 170 all ranks evaluate. Each step's loss is printed;
each step is also told to the monitor, unless HEARTBEAT is 0.
"""

from __future__ import annotations

import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slurm_health import heartbeat

_WIDTH = 32
_CHUNK_BYTES = 256 << 10


def main(directory: Path, minutes: float, seed: int) -> None:
    """Train for so many minutes; what is uneven follows from the seed."""
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    rank = dist.get_rank()
    shared, own = random.Random(seed), random.Random(f"{seed} {rank}")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(_WIDTH, _WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    until_s = time.monotonic() + 60 * minutes
    step = 0
    while True:
        began_s = time.monotonic()
        time.sleep(min(6.0, own.lognormvariate(-0.6, 0.7)))
        own_s = time.monotonic() - began_s
        # All ranks end at the same step: the one whose time is over says so in the loss.
        over = torch.tensor([float(time.monotonic() > until_s)])
        loss = model(torch.ones(2, _WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(over)
        if os.environ.get("HEARTBEAT") != "0":
            heartbeat.step(step, own_s)
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        step += 1
        if step % 50 == 0:
            pause_s = shared.uniform(5, 90)
            if rank == 0:
                print(f"checkpoint, {pause_s:.0f} s", flush=True)
                write(directory / "checkpoint", pause_s)
            dist.barrier()
        if step % 170 == 0:
            evaluate(shared.uniform(5, 60))
        if over.item():
            break
    dist.destroy_process_group()


def write(path: Path, for_s: float) -> None:
    """Write a file for so long, as to a filesystem of some hundred kilobytes a second."""
    until_s = time.monotonic() + for_s
    with path.open("wb") as file:
        while time.monotonic() < until_s:
            file.write(os.urandom(_CHUNK_BYTES))
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            time.sleep(0.5)


def evaluate(for_s: float) -> None:
    """Compute for so long, a seventh of the time."""
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        busy_until_s = time.monotonic() + 0.05
        while time.monotonic() < busy_until_s:
            torch.ones(64, 64) @ torch.ones(64, 64)
        time.sleep(0.3)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
