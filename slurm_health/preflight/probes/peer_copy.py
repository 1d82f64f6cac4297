# SPDX-License-Identifier: Apache-2.0
"""How fast each two devices of a node exchange data, and whether it arrives as it was sent.

All devices of a node exchange with one other at a time, as in a tournament, until each has met
every other one: so each link is seen by itself, which an all-gather over all of them does not show.
"""

from __future__ import annotations

import functools
from statistics import median

import torch
import torch.distributed as dist

from slurm_health.preflight.probes.context import Figure, NotMeasured, ProbeContext, Sample
from slurm_health.preflight.probes.host_copy import payload, require_arrived
from slurm_health.preflight.probes.meeting import circles
from slurm_health.preflight.probes.timing import Pace, timed

# Half a millisecond at the 450 GB/s that NVLink of an H100 has in each direction.
CUDA_BYTES = 256 << 20
PACE = Pace(warm_ups=2, budget_s=0.1, least=3, most=10, window_s=0.01)


def measure(context: ProbeContext) -> list[Sample]:
    """Time exchanges with every other device of the node, and compare what the last one brought.

    A device is judged by the partner it is fastest with: its own link is in all of its exchanges,
    that of a slow partner only in one. The slowest is told beside it.

    Returns:
        One sample; its bytes are those of one direction, `figures` have the slowest partner.

    Raises:
        WrongResults: data arrived changed.
        NotMeasured: the worker has no accelerator.
    """
    if not context.on_cuda:
        raise NotMeasured("peer_copy: only accelerators exchange data with each other")
    size = min(int(context.options.get("copy_bytes", CUDA_BYTES)), CUDA_BYTES)
    mine = payload(size, context.device).add_(context.local_rank)
    theirs = torch.zeros_like(mine)
    samples: dict[int, Sample] = {}
    for circle in circles(context.local_rank, context.local_size)[1:]:
        others = [each for each in circle if each != context.local_rank]  # one, or nobody
        exchange = functools.partial(_exchange, mine, theirs, others, context)
        sample = timed(context, exchange, PACE)
        for other in others:
            sent = payload(size, context.device).add_(other)
            way = f"from device {other} to device {context.local_rank}"
            require_arrived(theirs, sent, way)
            samples[other] = sample
    by_speed = sorted(samples, key=lambda other: median(samples[other].iteration_ms))
    slowest = by_speed[-1]
    figures: dict[str, Figure] = {
        "slowest_with": slowest,
        "slowest_gb_per_s": round(size / median(samples[slowest].iteration_ms) / 1e6, 3),
    }
    return [samples[by_speed[0]]._replace(total_bytes=size, figures=figures)]


def _exchange(
    mine: torch.Tensor, theirs: torch.Tensor, others: list[int], context: ProbeContext
) -> None:
    """Send to another device, and receive as much from it, at the same time."""
    both = [
        dist.P2POp(way, tensor, other, context.group)
        for other in others
        for way, tensor in ((dist.isend, mine), (dist.irecv, theirs))
    ]
    if both:
        dist.batch_isend_irecv(both)  # who times it waits for the device
