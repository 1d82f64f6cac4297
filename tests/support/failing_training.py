# SPDX-License-Identifier: Apache-2.0
"""A small DDP training on CPUs that fails as asked: `failing_training.py CAUSE [RANK]`.

Without a rank all of them do. Started by torchrun, or once per task by srun. Without a cause it
trains for a moment and ends well.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 6
FAILS_AT = 3
WIDTH = 32
ALL = -1
# Far more than the limit leaves, and no page of it is touched.
TOO_MUCH_BYTES = 1 << 40


def wrong_shape() -> torch.Tensor:
    return torch.ones(2, WIDTH + 1)


def missing_key() -> None:
    raise KeyError("learning_rate")


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def use_up_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    bytearray(TOO_MUCH_BYTES)


def other_collective() -> None:
    dist.all_gather([torch.zeros(3)] * dist.get_world_size(), torch.zeros(3))


def not_a_number() -> None:
    assert not torch.isnan(torch.tensor(float("nan"))), "loss is NaN at step 3"


def dump_flight_record() -> None:
    """Leave what torch recorded where TORCH_FR_DUMP_TEMP_FILE says, as NCCL's watchdog does."""
    path = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{dist.get_rank()}"
    # torch does not declare it.
    dump: Callable[[], bytes] = getattr(torch._C._distributed_c10d, "_dump_fr_trace")  # noqa: B009
    Path(path).write_bytes(dump())


CAUSES: dict[str, Callable[[], torch.Tensor | None]] = {
    "wrong-shape": wrong_shape,
    "key-error": missing_key,
    "kill": lambda: kill(signal.SIGKILL),
    "segfault": lambda: kill(signal.SIGSEGV),
    "memory": use_up_memory,
    "disk-full": lambda: print(Path("/dev/full").write_text("checkpoint")),
    "mismatch": other_collective,
    "nan": not_a_number,
    "exit": lambda: os._exit(3),
    "wait": lambda: time.sleep(3600),
}


def main(cause: str, chosen: int) -> None:
    if "RANK" not in os.environ:  # started by srun
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        train(cause, chosen, rank, model, optimizer)
    finally:
        if "TORCH_FR_DUMP_TEMP_FILE" in os.environ:
            dump_flight_record()
    dist.destroy_process_group()


def train(
    cause: str,
    chosen: int,
    rank: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    for step in range(STEPS):
        batch = torch.ones(2, WIDTH)
        if step == FAILS_AT:
            given = CAUSES[cause]() if cause in CAUSES and chosen in {rank, ALL} else None
            batch = batch if given is None else given
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "", int(sys.argv[2]) if len(sys.argv) > 2 else ALL)
