# SPDX-License-Identifier: Apache-2.0
"""A DDP training on CPUs for torchrun that checkpoints after each step: `… CHECKPOINT STEPS`.

As long as the file CHECKPOINT.hold is there it goes on for ever, a step at a time. With
`FAIL="CAUSE STEP RANK TIMES"` the rank (-1: all) fails in that way at that step, so many times.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WIDTH = 16


def fail(checkpoint: Path, rank: int, step: int) -> None:
    cause, at, on, times = os.environ.get("FAIL", "none 0 0 0").split()
    if step < int(at) or int(on) not in {rank, -1}:
        return
    marks = [checkpoint.with_suffix(f".failed-{rank}-{time}") for time in range(int(times))]
    left = [mark for mark in marks if not mark.exists()]
    if not left:
        return
    left[0].touch()
    if cause == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if cause == "key-error":
        raise KeyError("learning_rate")


def main(checkpoint: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    begin = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        begin = saved["step"] + 1
    if rank == 0:
        print(f"{count} processes begin at {begin}", flush=True)
    hold = checkpoint.with_suffix(".hold")
    step = begin
    while hold.exists() or step < steps:
        fail(checkpoint, rank, step)
        model(torch.ones(2, WIDTH)).square().mean().backward()
        # All leave the loop together: the file may vanish between two looks.
        if rank == 0:
            new = checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "step": step}, new)
            new.replace(checkpoint)
        go_on = torch.tensor(int(hold.exists() or step + 1 < steps))
        dist.broadcast(go_on, 0)
        step += 1
        if not go_on.item():
            break
        time.sleep(0.2)
    if rank == 0:
        print(f"{count} processes end at {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
