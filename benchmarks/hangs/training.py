# SPDX-License-Identifier: Apache-2.0
"""A DDP training over gloo that hangs in one way: `training.py HOW`, one task per rank by srun.

It knows nothing of slurm-health. The rank that is to hang leaves the time in `hung-JOB` when it
does; of a fault from outside, the training leaves it once it has trained for a while.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

HOW = sys.argv[1]
RANK, WORLD = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
JOB = os.environ["SLURM_JOB_ID"]
AT, STEP_S = 20, 0.5
HANGS = (0 if HOW == "skipped" else 1) == RANK


def mark() -> None:
    """Note when it hung."""
    Path(f"hung-{JOB}.new").write_text(str(time.time()))
    Path(f"hung-{JOB}.new").replace(f"hung-{JOB}")


class Batches:
    """Batches without end; of a loader that is stuck, from a pipe that nobody writes to."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, step: int) -> torch.Tensor:
        if HOW == "loader" and HANGS and step == AT:
            pipe = Path(f"pipe-{JOB}")
            os.mkfifo(pipe)
            mark()
            pipe.read_bytes()
        return torch.ones(8, 256)


def main() -> None:
    """Train until it hangs."""
    port = int(os.environ["MASTER_PORT"]) + (HOW == "rendezvous" and HANGS)
    os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(WORLD), "MASTER_PORT": str(port)}
    if HOW == "rendezvous" and RANK == 0:
        mark()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = torch.zeros(1)
    batches: Any = Batches()  # a data set of torch's by what it can do
    for step, batch in enumerate(DataLoader(batches, batch_size=None, num_workers=1)):
        time.sleep(STEP_S)
        if HANGS and (HOW, step) in {("first", 0), ("step", AT)}:
            mark()
            os.kill(os.getpid(), signal.SIGSTOP)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not (HOW == "skipped" and HANGS and step == AT):
            dist.all_reduce(seen)
        else:
            mark()
            dist.barrier()
        if HOW == "sockets" and RANK == 0 and step == AT:
            mark()
        if RANK == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
