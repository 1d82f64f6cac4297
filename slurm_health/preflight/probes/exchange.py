# SPDX-License-Identifier: Apache-2.0
"""How fast devices exchange data, with each other and with their host, and whether it arrives.

In a group by all-gathers. With the host from and to pinned memory, as data loaders use it: the
device fetches and brings the data itself. All devices of a node do so at the same time, as in
training, so that what shares a switch or the host's memory has its share of it.

With each other: all devices of a node exchange with one other at a time, as in a tournament, until
each has met every other one: so each link is seen by itself, which an all-gather over all of them
does not show.

What every rank sends is known to all: what arrives is compared with it, word by word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurm_health.preflight.probes.context import (
    Figure,
    NotMeasured,
    ProbeContext,
    Sample,
    WrongPayload,
    WrongResults,
)
from slurm_health.preflight.probes.meeting import circles
from slurm_health.preflight.probes.timing import TimingPlan, timed

# All-gathers over sockets are on the plateau of their bandwidth with this much of each rank. The
# first transfers of a connection wait for each other's acknowledgements and for the window to open:
# they take ten times as long as later ones. A slow link takes long enough for each: three times are
# enough to tell it from one that is not.
SOCKET_BYTES = 4 << 20
_SOCKET_PLAN = TimingPlan(warm_ups=5, budget_s=0.3, least=3, most=20, warm_up_s=0.25)
_LIGHT_PLAN = TimingPlan(warm_ups=5, budget_s=0.06, least=3, most=8, warm_up_s=0.03)
# An iteration takes milliseconds there, and rails begin a few milliseconds apart: all of them are
# busy during almost all of half a second.
CUDA_PLAN = TimingPlan(warm_ups=5, budget_s=0.5, least=4, most=20, window_s=0.025)
# Over a millisecond at 50 GB/s, which PCIe of generation 5 reaches, and little pinned memory.
HOST_BYTES = 64 << 20
_HOST_PLAN = TimingPlan(warm_ups=2, budget_s=0.2, least=5, most=20, window_s=0.01)
# Half a millisecond at the 450 GB/s that NVLink of an H100 has in each direction.
PEER_BYTES = 256 << 20
_PEER_PLAN = TimingPlan(warm_ups=2, budget_s=0.1, least=3, most=10, window_s=0.01)


def allgather(context: ProbeContext) -> list[Sample]:
    """Time all-gathers over the context's group, then compare what the last one brought.

    Raises:
        WrongPayload: what another rank sent arrived changed.
    """
    device, group, ranks = context.compute, context.peers, context.world_size
    size = context.size("gather_bytes", SOCKET_BYTES)
    mine = device.payload(size, context.rank)
    whole = device.words(size * ranks)
    device.fill(whole, 0)
    plan = CUDA_PLAN if context.on_cuda else _SOCKET_PLAN if device.torch else _LIGHT_PLAN
    sample = timed(context, lambda: group.all_gather(whole, mine), plan)
    wrong = []
    for rank in range(ranks):
        part = whole[rank * len(mine) : (rank + 1) * len(mine)]
        if rank != context.rank and device.difference(part, device.payload(size, rank))[0]:
            wrong.append(rank)
    if wrong:
        raise WrongPayload(
            f"rank {context.rank} of {ranks} received other data than rank"
            f" {', '.join(map(str, wrong))} sent: {len(wrong)} of {ranks} parts of an all-gather"
            " differ"
        )
    return [sample._replace(shared=True, total_bytes=size * ranks)]


def host_copy(context: ProbeContext) -> list[Sample]:
    """Time copies in each direction, and compare what the last one of each brought.

    Returns:
        Two samples of quantity `to_device` and `to_host`; their bytes are counted once.

    Raises:
        WrongResults: data arrived changed.
        NotMeasured: the worker has no accelerator.
    """
    if not context.on_cuda:
        raise NotMeasured("host_copy: only an accelerator exchanges data with its host")
    device = context.compute
    size = min(context.size("copy_bytes", HOST_BYTES), HOST_BYTES)
    sent = device.payload(size, 0).cpu().pin_memory()
    there, back = device.words(size), sent.new_zeros(sent.shape).pin_memory()
    to_device = timed(context, lambda: device.copy(there, sent), _HOST_PLAN)
    _require_arrived(context, there, device.payload(size, 0), f"from the host to {device.name}")
    there.bitwise_not_()  # what lies in the host's memory already must not pass for what arrived
    to_host = timed(context, lambda: device.copy(back, there), _HOST_PLAN)
    context.synchronize()
    _require_arrived(context, back, sent.bitwise_not(), f"from {device.name} to the host")
    return [
        to_device._replace(quantity="to_device", total_bytes=size),
        to_host._replace(quantity="to_host", total_bytes=size),
    ]


def peer_copy(context: ProbeContext) -> list[Sample]:
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
    import torch.distributed as dist

    device, me = context.compute, context.local_rank
    size = min(context.size("copy_bytes", PEER_BYTES), PEER_BYTES)
    mine, theirs = device.payload(size, me), device.words(size)
    samples: dict[int, Sample] = {}
    for circle in circles(me, context.local_size)[1:]:
        others = [rank for rank in circle if rank != me]  # one, or nobody

        def exchange(others: list[int] = others) -> None:
            """Send to another device, and receive as much from it, at the same time."""
            both = [
                dist.P2POp(way, words, other, context.group)
                for other in others
                for way, words in ((dist.isend, mine), (dist.irecv, theirs))
            ]
            for work in dist.batch_isend_irecv(both) if both else ():
                work.wait()  # the device does, not its host

        sample = timed(context, exchange, _PEER_PLAN)
        for other in others:
            way = f"from device {other} to {device.name}"
            _require_arrived(context, theirs, device.payload(size, other), way)
            samples[other] = sample
    typical_ms = {other: _median(sample.iteration_ms) for other, sample in samples.items()}
    by_speed = sorted(typical_ms, key=lambda other: typical_ms[other])
    slowest = by_speed[-1]
    figures: dict[str, Figure] = {
        "slowest_with": slowest,
        "slowest_gb_per_s": round(size / typical_ms[slowest] / 1e6, 3),
    }
    return [samples[by_speed[0]]._replace(total_bytes=size, figures=figures)]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _require_arrived(context: ProbeContext, arrived: Any, sent: Any, way: str) -> None:
    """Make sure that every word is what was sent.

    Raises:
        WrongResults: one is not.
    """
    wrong = context.compute.difference(arrived, sent)[0]
    if wrong:
        raise WrongResults(
            f"data changed on its way {way}: {wrong} of {len(sent)} words differ from those sent"
        )
