# SPDX-License-Identifier: Apache-2.0
"""How fast light workers exchange data over sockets, how soon, and whether it is what was sent."""

from __future__ import annotations

import os
import time
import zlib

from slurm_health.preflight.probes.context import ProbeContext, Sample, WrongPayload
from slurm_health.preflight.probes.light_ring import Ring
from slurm_health.preflight.probes.timing import (
    SOCKET_BYTES_PER_RANK,
    WARM_UP_ITERATIONS,
    TimingPlan,
    timed,
)

# As over sockets with torch, for less long.
PACE = TimingPlan(warm_ups=WARM_UP_ITERATIONS, budget_s=0.06, least=3, most=8, warm_up_s=0.03)
_ROUND_TRIPS = 10
_BLOCK_BYTES = 1 << 16  # random ones, which are sent again and again: to make more takes longer


def allgather(context: ProbeContext) -> list[Sample]:
    """Time all-gathers over the context's group, then compare what the last one brought.

    How long the smallest one takes is told as `latency_us`: the slowest pair of neighbours' way
    there and back, where they are two. `retransmitted` counts the segments that were sent again.

    Raises:
        WrongPayload: what another rank sent arrived changed.
    """
    ring: Ring = context.group
    whole = memoryview(bytearray(context.world_size * SOCKET_BYTES_PER_RANK))
    whole[_place(context.rank)] = os.urandom(_BLOCK_BYTES) * (SOCKET_BYTES_PER_RANK // _BLOCK_BYTES)
    sample = timed(context, lambda: ring.gather(whole), PACE)
    _require_same(ring, whole)
    took_ms = []
    for _ in range(_ROUND_TRIPS):  # until every rank has a number of every other
        start = time.perf_counter()
        ring.numbers(ring.rank)
        took_ms.append((time.perf_counter() - start) * 1e3)
    return [
        sample._replace(
            shared=True,
            total_bytes=len(whole),
            figures={
                "latency_us": round(sorted(took_ms)[_ROUND_TRIPS // 2] * 1e3, 1),
                "retransmitted": ring.retransmitted(),
            },
        )
    ]


def _place(rank: int) -> slice:
    return slice(rank * SOCKET_BYTES_PER_RANK, (rank + 1) * SOCKET_BYTES_PER_RANK)


def _require_same(ring: Ring, whole: memoryview) -> None:
    """Compare the checksum of each rank's part with that of what the rank sent.

    Raises:
        WrongPayload: they differ.
    """
    received = [zlib.crc32(whole[_place(rank)]) for rank in range(ring.size)]
    sent = ring.numbers(received[ring.rank])
    wrong = [rank for rank in range(ring.size) if sent[rank] != received[rank]]
    if wrong:
        raise WrongPayload.of(ring.rank, ring.size, wrong)
