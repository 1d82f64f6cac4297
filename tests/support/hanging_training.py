# SPDX-License-Identifier: Apache-2.0
"""A DDP training on CPUs that hangs as asked: `hanging_training.py CAUSE [RANK]`.

Started once per task by srun. `CAUSE` is one of `CAUSES`; without one it trains until the file
`end` is there, or for STEPS steps. It has a heartbeat unless HEARTBEAT is 0, and prints steps
unless SILENT is 1. With ONCE=1 it hangs if no other start has before, and trains what is left of
STEPS otherwise. A step takes STEP_S seconds, a checkpoint every PAUSE_EVERY steps PAUSE_S.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from slurm_health import heartbeat

STEP_S = float(os.environ.get("STEP_S", "1"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))
PAUSE_EVERY = int(os.environ.get("PAUSE_EVERY", "1000000"))
WIDTH = 32
STEPS = int(os.environ.get("STEPS", "1000000000"))
HANGS_AT = int(os.environ.get("HANGS_AT", "12"))
ONCE = os.environ.get("ONCE") == "1"
if ONCE and Path("hung").exists():
    STEPS -= HANGS_AT


class Batches(IterableDataset[torch.Tensor]):
    """Batches without end; from a step on they come from a pipe that nobody writes to."""

    def __init__(self, stuck_after: int | None) -> None:
        self._stuck_after = stuck_after

    def __iter__(self) -> Iterator[torch.Tensor]:
        step = 0
        while not Path("end").exists() and step < STEPS:
            step += 1
            if self._stuck_after is not None and step > self._stuck_after:
                read_pipe()
            yield torch.ones(2, WIDTH)


def read_pipe() -> None:
    """Read from a pipe as a file of a filesystem that does not answer."""
    path = Path(f"pipe-{os.getpid()}")
    os.mkfifo(path)
    path.read_bytes()


def main(cause: str, chosen: int) -> None:
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=1800))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mine = chosen == rank
    # A worker that hangs keeps open the connections of a rank that is killed: nobody notices.
    workers = 1 if cause in {"worker", "kill"} else 0
    # A rank that is to be killed at a step gets there.
    stuck_after = {"loader": HANGS_AT, "worker": HANGS_AT, "kill": HANGS_AT + 1}.get(cause)
    batches = DataLoader(
        Batches(stuck_after if mine else None), batch_size=None, num_workers=workers
    )
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    for step, batch in enumerate(batches):
        began_s = time.monotonic()
        slow = 1.5 if cause == "slow" and mine else 1.0
        time.sleep(STEP_S * slow)
        own_s = time.monotonic() - began_s
        if step == HANGS_AT and mine and not (ONCE and Path("hung").exists()):
            Path("hung").touch()
            hang(cause)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if os.environ.get("HEARTBEAT") != "0":
            heartbeat.step(step, own_s)
        if rank == 0 and os.environ.get("SILENT") != "1":
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if (step + 1) % PAUSE_EVERY == 0:
            if rank == 0:
                time.sleep(PAUSE_S)
            dist.barrier()
    dist.destroy_process_group()


def hang(cause: str) -> None:
    if cause == "mismatch":
        dist.all_gather([torch.zeros(3)] * dist.get_world_size(), torch.zeros(3))
    elif cause == "own-code":
        read_pipe()
    elif cause in {"kill", "die", "stop"}:
        os.kill(os.getpid(), signal.SIGSTOP if cause == "stop" else signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "", int(sys.argv[2]) if len(sys.argv) > 2 else -1)
