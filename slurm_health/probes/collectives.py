# SPDX-License-Identifier: Apache-2.0
"""How fast the members of a group exchange data."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

# On the bandwidth plateau of each kind of link: sockets between CPUs, NVLink and RDMA between GPUs.
CPU_BYTES_PER_RANK = 4 << 20
CUDA_BYTES_PER_RANK = 128 << 20
# The first transfers of a connection wait for each other's acknowledgements and for the window to
# open: on sockets they take ten times as long as later ones.
WARM_UP_ITERATIONS = 5
# The group times at least MIN and at most MAX iterations, as many as fit its budget.
BUDGET_S = 0.3
MIN_ITERATIONS = 4
MAX_ITERATIONS = 20


@dataclass(frozen=True)
class AllgatherSample:
    """Milliseconds per all-gather on this rank, and the size of the gathered array."""

    iteration_ms: list[float]
    total_bytes: int
    world_size: int


def measure_allgather(device: torch.device) -> AllgatherSample:
    """Time all-gathers over the default process group.

    All ranks run the same number of iterations: the group agrees on it after the warm-up.
    """
    world_size = dist.get_world_size()
    cuda = device.type == "cuda"
    per_rank = CUDA_BYTES_PER_RANK if cuda else CPU_BYTES_PER_RANK
    mine = torch.randn(per_rank // 4, device=device)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    warm_up_ms = [_timed_ms(gathered, mine, device) for _ in range(WARM_UP_ITERATIONS)]
    count = _agreed_count(min(warm_up_ms), device)
    iteration_ms = [_timed_ms(gathered, mine, device) for _ in range(count)]
    return AllgatherSample(
        iteration_ms=iteration_ms, total_bytes=per_rank * world_size, world_size=world_size
    )


def _timed_ms(gathered: list[torch.Tensor], mine: torch.Tensor, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    dist.all_gather(gathered, mine)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _agreed_count(typical_ms: float, device: torch.device) -> int:
    slowest = torch.tensor([typical_ms], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    fits = int(BUDGET_S * 1e3 / max(float(slowest.item()), 1e-3))
    return max(MIN_ITERATIONS, min(MAX_ITERATIONS, fits))
