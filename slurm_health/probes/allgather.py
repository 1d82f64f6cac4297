# SPDX-License-Identifier: Apache-2.0
"""How fast the members of a group exchange data."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from slurm_health.probes.context import ProbeContext, Sample

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


def measure(context: ProbeContext) -> list[Sample]:
    """Time all-gathers over the default process group.

    All ranks run the same number of iterations: the group agrees on it after the warm-up.
    """
    per_rank = CUDA_BYTES_PER_RANK if context.on_cuda else CPU_BYTES_PER_RANK
    mine = torch.randn(per_rank // 4, device=context.device)
    whole = torch.empty(context.world_size * mine.numel(), device=context.device)
    warm_up_ms = [_timed_ms(whole, mine, context) for _ in range(WARM_UP_ITERATIONS)]
    fits = int(BUDGET_S * 1e3 / context.slowest_ms(min(warm_up_ms)))
    count = max(MIN_ITERATIONS, min(MAX_ITERATIONS, fits))
    iteration_ms = [_timed_ms(whole, mine, context) for _ in range(count)]
    total_bytes = per_rank * context.world_size
    return [Sample(iteration_ms=iteration_ms, shared=True, total_bytes=total_bytes)]


def _timed_ms(whole: torch.Tensor, mine: torch.Tensor, context: ProbeContext) -> float:
    context.synchronize()
    start = time.perf_counter()
    if context.on_cuda:
        # Into one tensor: a list is gathered into a buffer first, and its copy would be timed too.
        _gather_into(whole, mine)
    else:
        # Gloo has long known only this.
        dist.all_gather(list(whole.chunk(context.world_size)), mine)
    context.synchronize()
    return (time.perf_counter() - start) * 1e3


def _gather_into(whole: torch.Tensor, mine: torch.Tensor) -> None:
    renamed = getattr(dist, "all_gather_single", None)  # so from torch 2.13 on
    (renamed or dist.all_gather_into_tensor)(whole, mine)
