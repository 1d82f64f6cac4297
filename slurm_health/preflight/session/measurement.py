# SPDX-License-Identifier: Apache-2.0
"""From raw samples to figures: medians, bandwidth as nccl-tests defines it, and group results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from slurm_health.records.probe_catalog import Metric
from slurm_health.records.records import NodeReported, Sampled
from slurm_health.records.verdict import GroupResult, MetricName, Outcome

# Scopes in which one time belongs to several nodes at once.
_SHARED_SCOPES = frozenset({"rail", "pair"})
# What is judged apart, where a node has several of it, so that a verdict names it.
_PARTS = {"solo": "device", "rail": "rail"}
# Of a time at least so much is a node's own: the kernel's counts are no better than that.
_LEAST_SERVED = 0.02


class Timed(NamedTuple):
    """What a sample comes to: how long its node took, or with `together` its whole group.

    `metric` names the device or rail where the node has several; the sample says how much was done
    in that time.
    """

    sample: Sampled
    metric: Metric
    elapsed_ms: float
    together: bool


def group_times(group: Collection[str], samples: Iterable[Sampled]) -> Iterator[Timed]:
    """Yield what a group measured: the one reduction of samples, for verdicts and reports.

    What nodes do together takes as long as it does for the slowest of them. If the time of one is
    not known, neither is that of the group. Of samples that were taken again the last one counts.
    """
    shared: dict[Metric, dict[str, tuple[Sampled, _Typical]]] = {}
    alone: dict[Metric, dict[str, tuple[Sampled, _Typical]]] = {}
    for sample in samples:
        kept = shared if sample.scope in _SHARED_SCOPES else alone
        for metric, typical in _parts(sample) if sample.node in group else ():
            kept.setdefault(metric, {})[sample.node] = sample, typical
    for metric, of_nodes in shared.items():
        if len(of_nodes) == len(group):
            elapsed_ms = _slowest(typical for _, typical in of_nodes.values()).own_ms
            for sample, _ in of_nodes.values():
                yield Timed(sample, metric, elapsed_ms, together=True)
    for metric, of_nodes in alone.items():
        for sample, typical in of_nodes.values():
            yield Timed(sample, metric, typical.own_ms, together=False)


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
    return max((value for value in typical_ms(sample) if value is not None), default=None)


def typical_ms(sample: Sampled) -> list[float | None]:
    """Return the typical iteration of each rank, None where nothing usable was timed.

    Typical is the median of a device's own work, and the lower quartile of a collective: what
    disturbs a transfer (another job's traffic, a preempted partner) only ever adds time, and a
    bad link slows every transfer. While others have the processors nothing is the node's own: that
    time is left out.
    """
    return [None if each is None else each.own_ms for each in _typical(sample)]


def served(sample: Sampled) -> float | None:
    """Return the share of the time that others did not take, None where nothing was timed."""
    return min((each.served for each in _typical(sample) if each is not None), default=None)


@dataclass(frozen=True)
class _Typical:
    """A typical iteration: how long it took, and the share of that which others did not take."""

    elapsed_ms: float
    served: float

    @property
    def own_ms(self) -> float:
        return self.elapsed_ms * self.served


def _typical(sample: Sampled) -> list[_Typical | None]:
    found: list[_Typical | None] = []
    for rank, elapsed_ms in enumerate(sample.iteration_ms):
        taken_ms = sample.taken_ms[rank] if rank < len(sample.taken_ms) else []
        found.append(_typical_of(elapsed_ms, taken_ms, alone=sample.scope == "solo"))
    return found


def _typical_of(
    elapsed_ms: Sequence[float], taken_ms: Sequence[float], *, alone: bool
) -> _Typical | None:
    typical = median if alone else lower_quartile
    middle_ms = typical(elapsed_ms) if elapsed_ms else 0.0
    if not 0.0 < middle_ms < float("inf"):
        return None
    if len(taken_ms) != len(elapsed_ms):
        return _Typical(middle_ms, 1.0)
    own_ms = [
        max(whole - taken, _LEAST_SERVED * whole)
        for whole, taken in zip(elapsed_ms, taken_ms, strict=True)
    ]
    return _Typical(middle_ms, min(1.0, typical(own_ms) / middle_ms))


def _slowest(typical: Iterable[_Typical]) -> _Typical:
    """Return what several did together: as long as for the slowest, who may wait for another.

    What others took of the one who had least, all have waited for.
    """
    found = list(typical)
    return _Typical(max(t.elapsed_ms for t in found), min(t.served for t in found))


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
    round_s: float | None = None,
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
        round_s: how long the whole round took, None where that is not known.
    """
    samples = list(samples)
    own = (served(each) for each in samples if each.scope == "solo" and each.node in group)
    crashed = tuple(node for node in group if node in reports and reports[node].crashed)
    failed = [node for node in group if _failed(reports.get(node))]
    times = list(group_times(group, samples))
    away = {*silent, *(node for node, report in reports.items() if report.unmeasured)}
    quiet = tuple(node for node in group if node in away)
    return GroupResult(
        nodes=tuple(group),
        outcome=_outcome(group, reports, silent=quiet, timed_out=timed_out),
        shared_ms={timed.metric: timed.elapsed_ms for timed in times if timed.together},
        node_ms=_of_models((timed for timed in times if not timed.together), models),
        silent=quiet,
        crashed=crashed,
        said={
            node: reports[node].detail
            for node in group
            if node in reports
            and reports[node].detail
            and (len(group) == 1 or node in {*failed, *crashed, *quiet})
        },
        round_s=round_s,
        served=min((share for share in own if share is not None), default=1.0),
    )


def _failed(report: NodeReported | None) -> bool:
    return report is not None and report.outcome is Outcome.FAILED


def _parts(sample: Sampled) -> Iterable[tuple[Metric, _Typical]]:
    """Yield the times of a sample: of each device, or rail, where it has many."""
    part = _PARTS.get(sample.scope)
    if part is None or len(sample.iteration_ms) == 1:
        if usable := [typical for typical in _typical(sample) if typical is not None]:
            yield sample.metric, _slowest(usable)
        return
    for rank, typical in enumerate(_typical(sample)):
        if typical is not None:
            yield replace(sample.metric, part=f"{part} {rank}"), typical


def _of_models(
    alone: Iterable[Timed], models: Mapping[str, str]
) -> dict[MetricName, dict[str, float]]:
    """Return the times with each node's apart from those of nodes of another model."""
    by_metric: dict[MetricName, dict[str, float]] = {}
    for timed in alone:
        node, metric = timed.sample.node, timed.metric
        model = models.get(node, "")
        compared = metric if model == metric.model else replace(metric, model=model)
        by_metric.setdefault(compared, {})[node] = timed.elapsed_ms
    return by_metric


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
