# SPDX-License-Identifier: Apache-2.0
"""What each rank runs: a training over NCCL, to which happens at a step what PLAYED_TRAINING says.

It runs under the interpreter with played GPUs, and never ends by itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from slurm_health import heartbeat

WIDTH = 64
PAUSE_S = 0.02  # a step takes about so long where nothing is wrong

PLAN = json.loads(os.environ["PLAYED_TRAINING"])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOCAL = int(os.environ["LOCAL_RANK"])
CAUSE = str(PLAN["cause"]).removeprefix("fsdp-").removeprefix("stage-")
MINE = RANK in PLAN["ranks"]


class Batches(IterableDataset[torch.Tensor]):
    """Batches without end; what happens to a rank may be that one never comes, or no more do."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        step = 0
        while True:
            if CAUSE.startswith("loader") and MINE and step == PLAN["step"]:
                mark()
                Path(PLAN["pipe"]).read_bytes()
            if CAUSE == "mount" and MINE and step == PLAN["step"]:
                mark()
                await_breaking()
                Path(PLAN["batch"]).read_bytes()
            if CAUSE == "behind" and MINE and step == PLAN["step"]:
                return
            yield torch.full((8, WIDTH), float(1 + step % 7))
            step += 1


def mark() -> None:
    """Say that it happens now."""
    Path(PLAN["mark"]).touch()


def happen(batch: torch.Tensor) -> torch.Tensor:
    """Let happen what is planned; return the batch to train with."""
    if not CAUSE.startswith(("loader", "mount")):
        mark()
    if PLAN["device_fault"]:
        await_breaking()
    elif CAUSE == "shape":
        return torch.ones(8, WIDTH + 1)
    elif CAUSE in DONE_TO_ITSELF:
        DONE_TO_ITSELF[CAUSE]()
    return batch


def await_breaking() -> None:
    """Wait until the benchmark has broken the device or the mount."""
    while not Path(PLAN["broken"]).exists():
        time.sleep(0.05)


def use_up_memory() -> None:
    """Allocate until there is no more: half a GB above what is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (512 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    held = []
    while True:
        held.append(bytearray(64 << 20))


DONE_TO_ITSELF: dict[str, Callable[[], object]] = {
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "own-code": lambda: time.sleep(3600),
    "mismatch": lambda: dist.all_gather([torch.zeros(3).cuda()] * WORLD, torch.zeros(3).cuda()),
    "mismatched-size": lambda: dist.all_reduce(torch.zeros(WIDTH).cuda()),
    "gone": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "memory": use_up_memory,
    "disk": lambda: torch.save({"step": PLAN["step"]}, "/dev/full"),
    "device-memory": lambda: torch.empty(1 << 40, dtype=torch.uint8, device="cuda"),
}


def network() -> torch.nn.Module:
    """Return a small network, alike on all ranks."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(WIDTH, 256), torch.nn.GELU(), torch.nn.Linear(256, WIDTH))
    return torch.nn.Sequential(*layers).cuda()


def data_parallel() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a step of DDP."""
    model = DistributedDataParallel(
        network(), device_ids=[LOCAL], gradient_as_bucket_view=True, broadcast_buffers=False
    )
    return _trained(model)


def sharded() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a step of FSDP."""
    from torch.distributed.fsdp import fully_shard

    model = network()
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return _trained(model)


def _trained(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        wait(model, loss)
        optimizer.step()
        return loss

    return step


def wait(model: torch.nn.Module, loss: torch.Tensor) -> None:
    """Wait for the device as the plan says; most trainings do it to print the loss."""
    if CAUSE == "loader-synchronize":
        torch.cuda.synchronize()
    elif CAUSE == "loader-clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    said = loss.item()
    if CAUSE == "nan":
        assert said == said, f"loss is {said}"


def pipeline() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a step of a pipeline of two stages, each with two replicas."""
    half = WORLD // 2
    first, place = half > RANK, RANK % half
    limit = timedelta(seconds=PLAN["timeout_s"])
    # Every rank makes every group, in the same order.
    data = [
        dist.new_group([stage, stage + 1], timeout=limit, group_desc="data") for stage in (0, half)
    ]
    lines = [
        dist.new_group([number, number + half], timeout=limit, group_desc="pipeline")
        for number in range(half)
    ]
    replicas, line = data[0 if first else 1], lines[place]
    other = place + half if first else place
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        if first:
            sent = model(batch)
            dist.send(sent.detach(), other, group=line)
            gradient = torch.empty_like(sent)
            dist.recv(gradient, other, group=line)
            sent.backward(gradient)
            loss = gradient
        else:
            given = torch.empty(8, WIDTH, device="cuda")
            dist.recv(given, other, group=line)
            given.requires_grad_()
            loss = model(given).square().mean()
            loss.backward()
            assert given.grad is not None
            dist.send(given.grad, other, group=line)
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=replicas)
        loss.mean().item()
        optimizer.step()
        return loss

    return step


def main() -> None:
    """Train until somebody ends it."""
    torch.cuda.set_device(LOCAL)
    dist.init_process_group("nccl", timeout=timedelta(seconds=PLAN["timeout_s"]))
    step = {"ddp": data_parallel, "fsdp": sharded, "pipeline": pipeline}[PLAN["training"]]()
    loader = DataLoader(Batches(), batch_size=None)
    batches = loader if PLAN["silent"] else heartbeat.loading(loader)
    for number, batch in enumerate(batches):
        began_s = time.monotonic()
        time.sleep(PAUSE_S)
        now = number == PLAN["step"]
        given = happen(batch) if now and (MINE or CAUSE == "nan") else batch
        if CAUSE == "nan" and now:
            given = given * float("nan")
        if CAUSE == "left-out" and now and not MINE:
            dist.all_reduce(torch.zeros(4).cuda())
        step(given.cuda())
        if not PLAN["silent"]:
            heartbeat.step(number, time.monotonic() - began_s)
        if RANK == 0:
            print(f"step {number}", flush=True)
    # The data has ended: the loss of all is told, and the checkpoint written.
    mark()
    losses = [torch.zeros(1).cuda()] * WORLD
    dist.all_gather(losses, torch.zeros(1).cuda())
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
