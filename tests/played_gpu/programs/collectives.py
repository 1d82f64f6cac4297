# SPDX-License-Identifier: Apache-2.0
"""Every collective of a process group over NCCL, and what its work says; rank N has device N."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
eager = torch.device("cuda", rank) if os.environ.get("EAGER") else None
dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=eager)


def of_rank(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape or (4,), float(value), dtype=dtype, device="cuda")


def holds(name: str, tensor: torch.Tensor, values: list[float]) -> None:
    assert tensor.cpu().tolist() == values, f"{name}: {tensor.cpu().tolist()}, not {values}"


everyone = range(size)
total = float(sum(everyone))

x = of_rank(rank)
dist.all_reduce(x)
holds("all_reduce", x, [total] * 4)
gathered = torch.empty(2 * size, device="cuda")
dist.all_gather_into_tensor(gathered, of_rank(rank, 2))
holds("all_gather", gathered, [float(r) for r in everyone for _ in range(2)])
mean = of_rank(rank, dtype=torch.bfloat16)
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
holds("mean", mean, [total / size] * 4)
largest = torch.tensor([rank, -rank], device="cuda")
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
holds("max", largest, [size - 1, 0])
sent = of_rank(rank)
dist.broadcast(sent, src=1)
holds("broadcast", sent, [1.0] * 4)
part = torch.empty(2, device="cuda")
dist.reduce_scatter_tensor(part, torch.arange(2.0 * size, device="cuda"))
holds("reduce_scatter", part, [2.0 * rank * size, (2.0 * rank + 1) * size])
swapped = torch.empty(size, device="cuda")
dist.all_to_all_single(swapped, torch.arange(float(size), device="cuda") + 10 * rank)
holds("all_to_all", swapped, [10.0 * r + rank for r in everyone])
received = torch.empty(2, device="cuda")
around = [
    dist.P2POp(dist.isend, of_rank(rank, 2), (rank + 1) % size),
    dist.P2POp(dist.irecv, received, (rank - 1) % size),
]
for work in dist.batch_isend_irecv(around):
    work.wait()
holds("send and receive", received, [float((rank - 1) % size)] * 2)
objects: list[object] = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": r} for r in everyone], objects
pair = dist.new_group([0, 1])
if rank < 2:
    y = of_rank(1)
    dist.all_reduce(y, group=pair)
    holds("a group", y, [2.0] * 4)
if eager:
    half = dist.split_group(split_ranks=[[0, 1]] if size == 2 else [[0, 1], list(range(2, size))])
    z = of_rank(1)
    dist.all_reduce(z, group=half)
    holds("a split group", z, [2.0 if rank < 2 else float(size - 2)] * 4)

# On two streams: what was called first comes first, although rank 0 has work before it.
one, two = torch.cuda.Stream(), torch.cuda.Stream()
first, second = of_rank(1), torch.empty(size, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(one):
    if rank == 0:
        before = torch.ones(1024, 1024, device="cuda")
        before @ before
    dist.all_reduce(first)
with torch.cuda.stream(two):
    dist.all_gather_into_tensor(second, of_rank(rank, 1))
torch.cuda.synchronize()
holds("on one stream", first, [float(size)] * 4)
holds("on another", second, [float(r) for r in everyone])

# Rank 0 comes late: until then the work of the others is pending, and their host goes on.
dist.barrier()
torch.cuda.synchronize()
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    store.wait([f"rank {r} has seen it pending" for r in range(1, size)])
work = dist.all_reduce(x, async_op=True)
work.wait()
queued = x * 2 + 1  # follows on the stream
if rank != 0:
    assert not work.is_completed(), "completed before all had come"
    store.set(f"rank {rank} has seen it pending", "")
assert queued.shape == x.shape
holds("what follows a collective", queued, [2 * total * size + 1] * 4)
assert work.is_completed()
try:
    print("is_success", work.is_success())
except NotImplementedError as error:
    print("is_success", type(error).__name__, str(error).splitlines()[0])
dist.destroy_process_group()
print("done")
