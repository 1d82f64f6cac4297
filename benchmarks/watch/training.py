# SPDX-License-Identifier: Apache-2.0
"""A training that hangs in one way: `training.py KIND HOW CULPRIT SCALE`, one task per rank.

It knows nothing of slurm-health. The rank that is to hang leaves the time in `hung-JOB` when it
does; of a fault from outside, the first rank leaves it once all have trained for a while.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KIND, HOW, CULPRIT, SCALE = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1"))
NAME = f"hung-{os.environ['WATCHED_JOB']}"
HANGS = RANK == CULPRIT
STEP_S = SCALE  # one second of a real job
AT = 120  # the step: the watch begins after a minute, and knows a pace of lines after 40 s more
DATA = Path("/tmp/watched/batch")


def mark() -> None:
    """Note when it hung."""
    Path(f"{NAME}.new").write_text(str(time.time()))
    Path(f"{NAME}.new").replace(NAME)


def produce(queue: Any) -> None:
    """Load data for a rank; that of the culprit dies at a step."""
    for step in range(1 << 30):
        if HOW == "worker" and HANGS and step == AT:
            mark()
            os.kill(os.getpid(), signal.SIGKILL)
        if DATA.exists():
            DATA.read_bytes()
        queue.put(step)


def train(compute: Callable[[int], None], other: Callable[[], None]) -> None:
    """Train until it hangs: `compute` is a step with the others, `other` another collective."""
    queue: Any = multiprocessing.get_context("fork").Queue(maxsize=1)
    multiprocessing.get_context("fork").Process(target=produce, args=(queue,), daemon=True).start()
    while True:
        step = queue.get()
        time.sleep(STEP_S)
        if HANGS and step == AT:
            if HOW == "stopped":
                mark()
                os.kill(os.getpid(), signal.SIGSTOP)
            elif HOW == "skipped":
                mark()
                other()
        compute(step)
        if RANK == 0:
            if step == AT and HOW in {"link", "filesystem"}:
                mark()
            print(f"step {step}", flush=True)


def by_torch() -> None:
    """Train by DDP, or by FSDP in two stages."""
    import torch
    import torch.distributed as dist

    if HOW == "rendezvous" and RANK == 0:
        mark()
    dist.init_process_group("gloo")
    seen = torch.zeros(1)
    if KIND == "fsdp":
        from torch.distributed.fsdp import fully_shard

        half = WORLD // 2
        mesh = dist.init_device_mesh("cpu", (2, half), mesh_dim_names=("stage", "shard"))
        model: Any = torch.nn.Linear(256, 256)
        fully_shard(model, mesh=mesh["shard"])
    else:
        half, model = 0, torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.ones(8, 256)

    def compute(_: int) -> None:
        if half and half <= RANK:
            dist.recv(batch, RANK - half)
        output = model(batch)
        if half > RANK:
            dist.send(output.detach(), RANK + half)
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
        dist.all_reduce(seen)

    train(compute, dist.barrier)


def by_mpi() -> None:
    """Train by MPI."""
    mpi: Any = importlib.import_module("mpi4py.MPI")

    world = mpi.COMM_WORLD
    here, all_of_them = [bytearray(8), mpi.LONG], [bytearray(8), mpi.LONG]
    train(lambda _: world.Allreduce(here, all_of_them), world.Barrier)


def by_sockets() -> None:
    """Sum up in a star of plain sockets."""
    if HOW == "rendezvous" and RANK == 0:
        mark()
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    peers = []
    if RANK == 0:
        server = socket.create_server(("", place[1]))
        peers = [server.accept()[0] for _ in range(WORLD - 1)]
    else:
        while not peers:
            try:
                peers = [socket.create_connection(place)]
            except OSError:
                time.sleep(0.2)

    def compute(step: int) -> None:
        for peer in peers:
            if RANK:
                peer.sendall(step.to_bytes(8, "big"))
            assert len(peer.recv(8, socket.MSG_WAITALL)) == 8
        for peer in peers if not RANK else []:
            peer.sendall(step.to_bytes(8, "big"))

    train(compute, lambda: None)


if __name__ == "__main__":
    {"mpi": by_mpi, "sockets": by_sockets}.get(KIND, by_torch)()
