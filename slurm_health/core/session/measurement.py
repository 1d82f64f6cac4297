# SPDX-License-Identifier: Apache-2.0
"""From raw samples to figures: medians, bandwidth as nccl-tests defines it, and group results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from types import MappingProxyType

from slurm_health.core.records import NodeReported, Sampled
from slurm_health.core.verdict import GroupResult, Outcome

# Scopes in which one time belongs to several nodes at once.
SHARED_SCOPES = frozenset({"rail", "pair"})


def metric(sample: Sampled) -> str:
    """Return the name of what a sample holds: that of its probe, and the quantity if it has one."""
    return f"{sample.probe} {sample.quantity}" if sample.quantity else sample.probe


def allgather_busbw_gb_per_s(*, total_bytes: int, ranks: int, elapsed_ms: float) -> float:
    """Return the bus bandwidth of one all-gather in GB/s (GB = 1e9 bytes).

    As nccl-tests defines it: algbw = S / t with S the size in bytes of the gathered array over
    all ranks, busbw = algbw * (n - 1) / n.
    """
    return total_bytes / (elapsed_ms * 1e6) * (ranks - 1) / ranks


def rate_gflop_per_s(*, flop: float, elapsed_ms: float) -> float:
    """Return the rate of a computation in GFLOP/s (1e9 operations a second)."""
    return flop / (elapsed_ms * 1e6)


def reduced_ms(sample: Sampled) -> float | None:
    """Return the typical iteration of the slowest rank, None where nothing usable was timed.

    The slowest rank counts, because a node is as fast as its slowest device.
    """
    return _slowest(typical_ms(sample))


def typical_ms(sample: Sampled) -> list[float | None]:
    """Return the typical iteration of each rank, None where nothing usable was timed.

    Typical is the median of a device's own work, and the lower quartile of a collective: what
    disturbs a transfer (another job's traffic, a preempted partner) only ever adds time, and a
    bad link slows every transfer.
    """
    typical = median if sample.scope == "solo" else lower_quartile
    found = [typical(rank) if rank else 0.0 for rank in sample.iteration_ms]
    return [value if 0.0 < value < float("inf") else None for value in found]


def _slowest(times_ms: Iterable[float | None]) -> float | None:
    return max((value for value in times_ms if value is not None), default=None)


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
    models: Mapping[str, str] = MappingProxyType({}),
) -> GroupResult:
    """Put together what the members of one group recorded in one round.

    Args:
        group: the members, in order.
        samples: their samples of that round.
        reports: each member's last word, absent where there is none.
        silent: members known to have no running agent.
        timed_out: the master ended the group because its deadline had passed.
        models: what each node computes with, where not all nodes of the run have the same: what
            a node does alone is then compared with nodes of its own model.
    """
    crashed = tuple(node for node in group if node in reports and reports[node].crashed)
    shared: dict[str, float] = {}
    per_node: dict[str, dict[str, float]] = {}
    for sample in samples:
        for name, elapsed_ms in _parts(sample):
            if sample.scope in SHARED_SCOPES:
                shared[name] = max(elapsed_ms, shared.get(name, 0.0))
            else:
                model = models.get(sample.node)
                compared = _of_model(name, model) if model else name
                per_node.setdefault(compared, {})[sample.node] = elapsed_ms
    away = {*silent, *(node for node, report in reports.items() if report.unmeasured)}
    quiet = tuple(node for node in group if node in away)
    return GroupResult(
        nodes=tuple(group),
        outcome=_outcome(group, reports, silent=quiet, timed_out=timed_out),
        shared_ms=shared,
        node_ms=per_node,
        silent=quiet,
        crashed=crashed,
        said={
            node: reports[node].detail
            for node in group
            if node in reports
            and reports[node].detail
            and (len(group) == 1 or node in {*crashed, *quiet})
        },
    )


def _parts(sample: Sampled) -> Iterable[tuple[str, float]]:
    """Return the times of a sample under their names: of each device, or rail, where it has many.

    A name is `metric` or `metric:part`; parts are judged apart, so that a verdict names them.
    """
    name, part = metric(sample), {"solo": "device", "rail": "rail"}.get(sample.scope)
    if part is None or len(sample.iteration_ms) == 1:
        elapsed_ms = reduced_ms(sample)
        return [] if elapsed_ms is None else [(name, elapsed_ms)]
    return [
        (f"{name}:{part} {rank}", elapsed_ms)
        for rank, elapsed_ms in enumerate(typical_ms(sample))
        if elapsed_ms is not None
    ]


def _of_model(name: str, model: str) -> str:
    base, colon, part = name.partition(":")
    return f"{base} on {model.replace(':', ' ')}{colon}{part}"


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
