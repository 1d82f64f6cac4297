# SPDX-License-Identifier: Apache-2.0
"""A DDP training with heartbeat and checkpoints, in which a fault happens as planned.

Started once per task by srun, with the plan as JSON in DIAGNOSIS_PLAN, on CPUs or GPUs. What
happens, happens on the first start only. It ends when the file `end` is there.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from slurm_health import heartbeat

STEP_S = 0.5
WIDTH = 768  # some MB of gradients, so that a throttled link shows
PRODUCTS = 4
EPOCH = 10  # steps; after each, ranks average their loss and write a checkpoint
LOCAL = Path("/tmp/diagnosis")
SLOWER = 1.6

PLAN = json.loads(os.environ["DIAGNOSIS_PLAN"])
RANK = int(os.environ["SLURM_PROCID"])
RESTART = int(os.environ.get("SLURM_HEALTH_RESTART_COUNT", "0"))
JOB = os.environ["SLURM_JOB_ID"]
CAUSE = str(PLAN["cause"]) if RESTART == 0 else ""
MINE = PLAN["rank"] == RANK
DEVICE = torch.device(PLAN["device"])


class Batches(IterableDataset[torch.Tensor]):
    """Batches from a file of the node, without end."""

    def __init__(self, begin: int) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[torch.Tensor]:
        step = self._begin
        while True:
            (LOCAL / "data" / "batch").read_bytes()
            if CAUSE == "loader" and MINE and step >= PLAN["step"]:
                mark(step)
                time.sleep((SLOWER - 1) * STEP_S)
            yield torch.ones(8, WIDTH)
            step += 1


def mark(step: int) -> None:
    """Note when it happened, once."""
    if step == PLAN["step"]:
        Path(f"fault-{JOB}.new").write_text(str(time.time()))
        Path(f"fault-{JOB}.new").replace(f"fault-{JOB}")


def happen(step: int, batch: torch.Tensor) -> torch.Tensor:
    """Let happen what is planned for this step; return the batch to train with."""
    if step != PLAN["step"] or not (MINE or CAUSE == "nan"):
        return batch
    if CAUSE in {"stopped", "mismatch", "killed", "memory", "shape"} or (CAUSE == "nan" and MINE):
        mark(step)
    match CAUSE:
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "mismatch":
            mine = torch.zeros(3, device=DEVICE)
            dist.all_gather([mine] * dist.get_world_size(), mine)
        case "memory":
            use_up_memory()
        case "shape":
            return torch.ones(8, WIDTH + 1)
        case "nan":
            loss = torch.log(torch.tensor(-1.0))
            assert torch.isfinite(loss), f"loss is {loss.item()} at step {step}"
    return batch


def use_up_memory() -> None:
    """Allocate until there is no more: half a GB above what is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (512 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    held = []
    while True:
        held.append(bytearray(64 << 20))


def save(model: torch.nn.Module, step: int) -> None:
    """Write this rank's part of the checkpoint, and from rank 0 where to go on."""
    new = LOCAL / "checkpoint" / "part.new"
    torch.save({"model": model.state_dict(), "step": step}, new)
    new.replace(new.with_name("part.pt"))
    if RANK == 0:
        Path(f"step-{JOB}.new").write_text(str(step))
        Path(f"step-{JOB}.new").replace(f"step-{JOB}")


def main() -> None:
    """Train until the file `end` is there."""
    os.environ |= {"RANK": str(RANK), "WORLD_SIZE": os.environ["SLURM_NTASKS"]}
    backend = "gloo" if DEVICE.type == "cpu" else "nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=1800))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved = Path(f"step-{JOB}")
    begin = int(saved.read_text()) + 1 if saved.exists() else 0
    batches = DataLoader(Batches(begin), batch_size=None, num_workers=PLAN["workers"])
    matrix = torch.rand(512, 512)
    # Its data is as long as that of the others plus a batch, from the planned step on.
    longer = CAUSE == "behind" and MINE
    step = begin
    for batch in heartbeat.loading(batches):
        began_s = time.monotonic()
        time.sleep(STEP_S * (1 + 0.3 * (step % 3)) / 1.3)  # the device's part, uneven
        for _ in range(PRODUCTS):
            matrix @ matrix
        given = happen(step, batch)
        loss = model(given.to(DEVICE)).square().mean()
        own_s = time.monotonic() - began_s
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        heartbeat.step(step, own_s)
        if RANK == 0:
            print(f"step {step} at {time.time():.2f} restart {RESTART}", flush=True)
        if longer and step >= PLAN["step"] and (step + 1) % EPOCH == 0:
            longer = False
            mark(PLAN["step"])
            continue
        step += 1
        if step % EPOCH == 0:
            end_of_epoch(model, step, loss.detach())
        go_on = torch.tensor(int(not Path("end").exists()), device=DEVICE)
        dist.broadcast(go_on, 0)
        if not go_on.item():
            break
    dist.destroy_process_group()


def end_of_epoch(model: torch.nn.Module, step: int, loss: torch.Tensor) -> None:
    """Tell everybody the loss of all, and write a checkpoint."""
    losses = [torch.zeros_like(loss)] * dist.get_world_size()
    dist.all_gather(losses, loss)
    if CAUSE == "healthy" and PLAN["rank"] == RANK:
        time.sleep(PLAN["pause_s"])
    save(model, step - 1)


if __name__ == "__main__":
    main()
