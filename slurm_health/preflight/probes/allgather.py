# SPDX-License-Identifier: Apache-2.0
"""How fast the members of a group exchange data, and whether it arrives as it was sent."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slurm_health.preflight.probes.context import ProbeContext, Sample, WrongPayload
from slurm_health.preflight.probes.timing import (
    SOCKET_BYTES_PER_RANK,
    SOCKET_PACE,
    WARM_UP_ITERATIONS,
    TimingPlan,
    timed,
)

# On the bandwidth plateau of NVLink and RDMA.
CUDA_BYTES_PER_RANK = 128 << 20
# An iteration takes milliseconds there, and rails begin a few milliseconds apart: all of them are
# busy during almost all of half a second.
CUDA_PACE = TimingPlan(warm_ups=WARM_UP_ITERATIONS, budget_s=0.5, least=4, most=20, window_s=0.025)


def measure(context: ProbeContext) -> list[Sample]:
    """Time all-gathers over the context's group, then compare what the last one brought.

    Raises:
        WrongPayload: what another rank sent arrived changed.
    """
    per_rank = SOCKET_BYTES_PER_RANK
    if context.on_cuda:
        per_rank = int(context.options.get("gather_bytes", CUDA_BYTES_PER_RANK))
    mine = torch.randn(per_rank // 4, device=context.device)
    whole = torch.zeros(context.world_size * mine.numel(), device=context.device)

    def gather() -> None:
        _gather(whole, mine, context)

    pace = CUDA_PACE if context.on_cuda else SOCKET_PACE
    sample = timed(context, gather, pace)
    _require_same(whole, mine, context)
    total_bytes = per_rank * context.world_size
    return [sample._replace(shared=True, total_bytes=total_bytes)]


def _gather(whole: torch.Tensor, mine: torch.Tensor, context: ProbeContext) -> None:
    if context.on_cuda:
        # Into one tensor: a list is gathered into a buffer first, and its copy would be timed too.
        _gather_into(whole, mine, group=context.group)
    else:
        # Gloo has long known only this.
        dist.all_gather(list(whole.chunk(context.world_size)), mine, group=context.group)


# Its name from torch 2.13 on, and before.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _require_same(whole: torch.Tensor, mine: torch.Tensor, context: ProbeContext) -> None:
    """Compare the checksum of each rank's part with that of what the rank sent.

    Raises:
        WrongPayload: they differ.
    """
    sent = torch.zeros(context.world_size, dtype=torch.int64, device=context.device)
    _gather(sent, _checksum(mine).reshape(1), context)
    parts = whole.chunk(context.world_size)
    wrong = [
        rank
        for rank, (part, checksum) in enumerate(zip(parts, sent))  # noqa: B905 - older Pythons run this
        if _checksum(part) != checksum
    ]
    if wrong:
        raise WrongPayload.of(context.rank, context.world_size, wrong)


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the values' bits as integers: any one changed bit changes it."""
    return values.view(torch.int32).sum(dtype=torch.int64)
