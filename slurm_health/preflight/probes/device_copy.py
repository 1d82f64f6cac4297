# SPDX-License-Identifier: Apache-2.0
"""How fast a device exchanges data with its host and with others, and whether it arrives as sent.

With the host from and to pinned memory, as data loaders use it: the device fetches and brings the
data itself. All devices of a node do so at the same time, as in training, so that what shares a
switch or the host's memory has its share of it.

With each other: all devices of a node exchange with one other at a time, as in a tournament, until
each has met every other one: so each link is seen by itself, which an all-gather over all of them
does not show.
"""

from __future__ import annotations

import functools
from statistics import median

import torch
import torch.distributed as dist

from slurm_health.preflight.probes.context import (
    Figure,
    NotMeasured,
    ProbeContext,
    Sample,
    WrongResults,
)
from slurm_health.preflight.probes.meeting import circles
from slurm_health.preflight.probes.timing import TimingPlan, timed

# Over a millisecond at 50 GB/s, which PCIe of generation 5 reaches, and little pinned memory.
HOST_BYTES = 64 << 20
HOST_PACE = TimingPlan(warm_ups=2, budget_s=0.2, least=5, most=20, window_s=0.01)
_WORD_BYTES = 8
# Odd, so that the products of all numbers below 2^64 differ: Knuth's for multiplicative hashing.
_FACTOR = 0x1E3779B97F4A7C15


def host(context: ProbeContext) -> list[Sample]:
    """Time copies in each direction, and compare what the last one of each brought.

    Returns:
        Two samples of quantity `to_device` and `to_host`; their bytes are counted once.

    Raises:
        WrongResults: data arrived changed.
        NotMeasured: the worker has no accelerator.
    """
    if not context.on_cuda:
        raise NotMeasured("host_copy: only an accelerator exchanges data with its host")
    size = min(int(context.options.get("copy_bytes", HOST_BYTES)), HOST_BYTES)
    sent = payload(size, torch.device("cpu")).pin_memory()
    there = torch.empty(sent.numel(), dtype=torch.int64, device=context.device)
    back = torch.empty_like(sent, pin_memory=True)
    to_device = timed(context, functools.partial(there.copy_, sent, non_blocking=True), HOST_PACE)
    require_arrived(there, payload(size, context.device), f"from the host to {_me(context)}")
    there.bitwise_not_()  # what lies in the host's memory already must not pass for what arrived
    to_host = timed(context, functools.partial(back.copy_, there, non_blocking=True), HOST_PACE)
    require_arrived(back, sent.bitwise_not(), f"from {_me(context)} to the host")
    return [
        to_device._replace(quantity="to_device", total_bytes=size),
        to_host._replace(quantity="to_host", total_bytes=size),
    ]


def _me(context: ProbeContext) -> str:
    return f"device {context.local_rank}"


def payload(size: int, device: torch.device) -> torch.Tensor:
    """Return so many bytes, the same on every device, in which no two words are alike."""
    return torch.arange(1, size // _WORD_BYTES + 1, device=device).mul_(_FACTOR)


def require_arrived(arrived: torch.Tensor, sent: torch.Tensor, way: str) -> None:
    """Make sure that every word is what was sent.

    Raises:
        WrongResults: one is not.
    """
    wrong = int((arrived != sent).sum().item())
    if wrong:
        raise WrongResults(
            f"data changed on its way {way}: {wrong} of {sent.numel()} words differ from those sent"
        )


# Half a millisecond at the 450 GB/s that NVLink of an H100 has in each direction.
PEER_BYTES = 256 << 20
PEER_PACE = TimingPlan(warm_ups=2, budget_s=0.1, least=3, most=10, window_s=0.01)


def peers(context: ProbeContext) -> list[Sample]:
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
    size = min(int(context.options.get("copy_bytes", PEER_BYTES)), PEER_BYTES)
    mine = payload(size, context.device).add_(context.local_rank)
    theirs = torch.zeros_like(mine)
    samples: dict[int, Sample] = {}
    for circle in circles(context.local_rank, context.local_size)[1:]:
        others = [each for each in circle if each != context.local_rank]  # one, or nobody
        exchange = functools.partial(_exchange, mine, theirs, others, context)
        sample = timed(context, exchange, PEER_PACE)
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
