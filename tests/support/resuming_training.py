# SPDX-License-Identifier: Apache-2.0
"""A small DDP training on CPUs that writes a checkpoint after each step and resumes from it.

    resuming_training.py CHECKPOINT STEPS [CAUSE STEP RANK]

Started once per task by srun. On the first start of the script, and only on that, the rank fails
in that way at that step. `wait` makes each step of all ranks take a second from there on, so that
something may be done to a node meanwhile.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH = 16


def fail(cause: str) -> None:
    if cause == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if cause == "key-error":
        raise KeyError("learning_rate")
    if cause == "reset":
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.1.2.3]")
    time.sleep(1)


def main(checkpoint: Path, steps: int, cause: str, fails_at: int, fails_on: int) -> None:
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    restart = int(os.environ["SLURM_HEALTH_RESTART_COUNT"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    begin = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        begin = saved["step"] + 1
    where = f"rank {rank} on {socket.gethostname()}"
    print(f"{where} begins at {begin}, restart {restart}, at {time.time():.1f}", flush=True)
    for step in range(begin, steps):
        if restart == 0 and step >= fails_at and fails_on in {rank, -1}:
            fail(cause)
        loss = model(torch.ones(2, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            new = checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "step": step}, new)
            new.replace(checkpoint)
            print(f"step {step} at {time.time():.1f} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    words = sys.argv[3:] or ["", "1000000", "-1"]
    main(Path(sys.argv[1]), int(sys.argv[2]), words[0], int(words[1]), int(words[2]))
