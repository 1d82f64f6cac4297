# SPDX-License-Identifier: Apache-2.0
"""From raw samples to figures: medians, bandwidth as nccl-tests defines it, and group results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from slurm_health.core.records import NodeReported, Sampled
from slurm_health.core.verdict import GroupResult, Outcome

# Probes that measure a group as a whole. All others measure each node by itself.
COLLECTIVES = frozenset({"allgather"})


def allgather_busbw_gb_per_s(*, total_bytes: int, ranks: int, elapsed_ms: float) -> float:
    """Return the bus bandwidth of one all-gather in GB/s (GB = 1e9 bytes).

    As nccl-tests defines it: algbw = S / t with S the size in bytes of the gathered array over
    all ranks, busbw = algbw * (n - 1) / n.
    """
    return total_bytes / (elapsed_ms * 1e6) * (ranks - 1) / ranks


def rate_gflop_per_s(*, flop: float, elapsed_ms: float) -> float:
    """Return the rate of a computation in GFLOP/s (1e9 operations a second)."""
    return flop / (elapsed_ms * 1e6)


def reduced_ms(probe: str, iteration_ms: Sequence[Sequence[float]]) -> float | None:
    """Return the typical iteration of the slowest rank, None where nothing usable was timed.

    Typical is the median of a node's own work, and the lower quartile of a collective: what
    disturbs a transfer (another job's traffic, a preempted partner) only ever adds time, and a
    bad link slows every transfer. The slowest rank counts, because a node is as fast as its
    slowest device.
    """
    typical = lower_quartile if probe in COLLECTIVES else median
    slowest = max((typical(rank) for rank in iteration_ms if rank), default=0.0)
    return slowest if 0.0 < slowest < float("inf") else None


def lower_quartile(values: Sequence[float]) -> float:
    """Return the value that three quarters of `values` are not below."""
    return sorted(values)[len(values) // 4]


def group_result(
    group: Sequence[str],
    samples: Iterable[Sampled],
    reports: Mapping[str, NodeReported],
    *,
    silent: Iterable[str] = (),
    timed_out: bool = False,
) -> GroupResult:
    """Put together what the members of one group recorded in one round.

    Args:
        group: the members, in order.
        samples: their samples of that round.
        reports: each member's last word, absent where there is none.
        silent: members known to have no running agent.
        timed_out: the master ended the group because its deadline had passed.
    """
    crashed = tuple(node for node in group if node in reports and reports[node].crashed)
    shared: dict[str, float] = {}
    per_node: dict[str, dict[str, float]] = {}
    for sample in samples:
        elapsed_ms = reduced_ms(sample.probe, sample.iteration_ms)
        if elapsed_ms is None:
            continue
        if sample.probe in COLLECTIVES:
            shared[sample.probe] = max(elapsed_ms, shared.get(sample.probe, 0.0))
        else:
            per_node.setdefault(sample.probe, {})[sample.node] = elapsed_ms
    quiet = tuple(node for node in group if node in set(silent))
    return GroupResult(
        nodes=tuple(group),
        outcome=_outcome(group, reports, silent=quiet, timed_out=timed_out),
        shared_ms=shared,
        node_ms=per_node,
        silent=quiet,
        crashed=crashed,
    )


def _outcome(
    group: Sequence[str],
    reports: Mapping[str, NodeReported],
    *,
    silent: Sequence[str],
    timed_out: bool,
) -> Outcome:
    outcomes = {reports[node].outcome for node in group if node in reports}
    if silent or not outcomes:
        return Outcome.NOT_RUN
    if Outcome.FAILED in outcomes:
        return Outcome.FAILED
    if timed_out or Outcome.TIMED_OUT in outcomes:
        return Outcome.TIMED_OUT
    return Outcome.MEASURED if outcomes == {Outcome.MEASURED} else Outcome.NOT_RUN
