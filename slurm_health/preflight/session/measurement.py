# SPDX-License-Identifier: Apache-2.0
"""From raw samples to times, figures and group results; bandwidth as nccl-tests defines it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from slurm_health.records.probe_catalog import ALLGATHERS, COPIES, MATMUL, Metric
from slurm_health.records.records import NodeReported, Sampled, VerdictReached
from slurm_health.records.verdict import GroupResult, Level, MetricName, Outcome

# Scopes in which one time belongs to several nodes at once.
_SHARED_SCOPES = frozenset({"rail", "pair"})
# What is judged apart, where a node has several of it, so that a verdict names it.
_PARTS = {"solo": "device", "rail": "rail"}
# Of a time at least so much is a node's own: the kernel's counts are no better than that.
_LEAST_SERVED = 0.02
# More bytes than any machine has: such a record is foreign, and could not become a float.
_IMPOSSIBLE_BYTES = 2**63


class Timed(NamedTuple):
    """How long the node of a sample took or, `together`, its whole group.

    `metric` names the device or rail where the node has several; the sample says how much was done
    in that time. `served` is the share of `elapsed_ms` that others did not take.
    """

    sample: Sampled
    metric: Metric
    elapsed_ms: float
    served: float
    together: bool = False

    @property
    def own_ms(self) -> float:
        """What is left of the time without what others took of the processors."""
        return self.elapsed_ms * self.served

    @property
    def value(self) -> float | None:
        """What it comes to, in the unit of its probe (`probe_catalog.unit_of`); None if nothing.

        An all-gather is its bus bandwidth in GB/s, a copy within a device what it reads and writes
        in GB/s, one from or to the host or another device what it brings, a product of matrices the
        rate in GFLOP/s, any other probe its time in ms.
        """
        sample, value = self.sample, self.own_ms
        if sample.probe in ALLGATHERS:
            if sample.world_size < 2 or not 0 < sample.total_bytes < _IMPOSSIBLE_BYTES:
                return None
            value = allgather_busbw_gb_per_s(
                total_bytes=sample.total_bytes, ranks=sample.world_size, elapsed_ms=value
            )
        elif sample.probe in COPIES:
            value = min(sample.total_bytes, _IMPOSSIBLE_BYTES) / (value * 1e6)
        elif sample.probe == MATMUL:
            value = rate_gflop_per_s(flop=sample.flop, elapsed_ms=value)
        return value if isfinite(value) and value > 0 else None


def group_times(group: Collection[str], samples: Iterable[Sampled]) -> Iterator[Timed]:
    """Yield what a group measured: the one reduction of samples, for verdicts and reports.

    What nodes do together takes as long as it does for the slowest of them. If the time of one is
    not known, neither is that of the group. Of samples that were taken again the last one counts.
    """
    shared: dict[Metric, dict[str, Timed]] = {}
    alone: dict[Metric, dict[str, Timed]] = {}
    for sample in samples:
        kept = shared if sample.scope in _SHARED_SCOPES else alone
        for timed in _parts(sample) if sample.node in group else ():
            kept.setdefault(timed.metric, {})[sample.node] = timed
    for of_nodes in shared.values():
        if len(of_nodes) == len(group):
            _, _, elapsed_ms, served, _ = _slowest(of_nodes.values())
            for timed in of_nodes.values():
                yield Timed(timed.sample, timed.metric, elapsed_ms, served, together=True)
    for of_nodes in alone.values():
        yield from of_nodes.values()


def allgather_busbw_gb_per_s(*, total_bytes: int, ranks: int, elapsed_ms: float) -> float:
    """Return the bus bandwidth of one all-gather in GB/s (GB = 1e9 bytes).

    As nccl-tests defines it: algbw = S / t with S the size in bytes of the gathered array over
    all ranks, busbw = algbw * (n - 1) / n.
    """
    return total_bytes / (elapsed_ms * 1e6) * (ranks - 1) / ranks


def rate_gflop_per_s(*, flop: float, elapsed_ms: float) -> float:
    """Return the rate of a computation in GFLOP/s (1e9 operations a second)."""
    return flop / (elapsed_ms * 1e6)


def _parts(sample: Sampled) -> list[Timed]:
    """Return the typical iteration of each device, or rail, if it has many; else of the slowest.

    Typical is the median of a device's own work, and the lower quartile of a collective: what
    disturbs a transfer (another job's traffic, a preempted partner) only ever adds time, and a
    bad link slows every transfer. While others have the processors nothing is the node's own: that
    time is left out.
    """
    part = _PARTS.get(sample.scope) if len(sample.iteration_ms) > 1 else None
    metric, alone = sample.metric, sample.scope == "solo"
    times: list[Timed] = []
    for rank, elapsed_ms in enumerate(sample.iteration_ms):
        taken_ms = sample.taken_ms[rank] if rank < len(sample.taken_ms) else []
        if typical := _typical(elapsed_ms, taken_ms, alone=alone):
            of_rank = metric if part is None else replace(metric, part=f"{part} {rank}")
            times.append(Timed(sample, of_rank, *typical))
    return times if sample.scope in _PARTS or not times else [_slowest(times)]


def _typical(
    elapsed_ms: Sequence[float], taken_ms: Sequence[float], *, alone: bool
) -> tuple[float, float] | None:
    """Return how long an iteration typically took, and the share that others did not take."""
    typical = median if alone else lower_quartile
    middle_ms = typical(elapsed_ms) if elapsed_ms else 0.0
    if not 0.0 < middle_ms < float("inf"):
        return None
    if len(taken_ms) != len(elapsed_ms):
        return middle_ms, 1.0
    own_ms = [
        max(whole - taken, _LEAST_SERVED * whole)
        for whole, taken in zip(elapsed_ms, taken_ms, strict=True)
    ]
    return middle_ms, min(1.0, typical(own_ms) / middle_ms)


def _slowest(times: Collection[Timed]) -> Timed:
    """Return what several did together: as long as for the slowest, who may wait for another.

    What others took of the one who had least, all have waited for.
    """
    first = next(iter(times))
    if len(times) == 1:
        return first
    return first._replace(
        elapsed_ms=max(timed.elapsed_ms for timed in times),
        served=min(timed.served for timed in times),
    )


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
    times = list(group_times(group, samples))
    crashed = tuple(node for node in group if node in reports and reports[node].crashed)
    away = {*silent, *(node for node, report in reports.items() if report.unmeasured)}
    quiet = tuple(node for node in group if node in away)
    return GroupResult(
        nodes=tuple(group),
        outcome=_outcome(group, reports, silent=quiet, timed_out=timed_out),
        shared_ms={timed.metric: timed.own_ms for timed in times if timed.together},
        node_ms=_of_models((timed for timed in times if not timed.together), models),
        silent=quiet,
        crashed=crashed,
        said={
            node: report.detail
            for node, report in reports.items()
            if report.detail
            if len(group) == 1 or report.outcome is Outcome.FAILED or node in (*crashed, *quiet)
        },
        round_s=round_s,
        served=min((timed.served for timed in times if timed.sample.scope == "solo"), default=1.0),
    )


def _of_models(
    alone: Iterable[Timed], models: Mapping[str, str]
) -> dict[MetricName, dict[str, float]]:
    """Return the times with each node's apart from those of nodes of another model."""
    by_metric: dict[MetricName, dict[str, float]] = {}
    for timed in alone:
        node, metric = timed.sample.node, timed.metric
        model = models.get(node, "")
        compared = metric if model == metric.model else replace(metric, model=model)
        by_metric.setdefault(compared, {})[node] = timed.own_ms
    return by_metric


def _outcome(
    group: Sequence[str],
    reports: Mapping[str, NodeReported],
    *,
    silent: Sequence[str],
    timed_out: bool,
) -> Outcome:
    outcomes = [reports[node].outcome for node in group if node in reports]
    if silent or not outcomes:
        return Outcome.NOT_RUN
    if Outcome.FAILED in outcomes:
        return Outcome.FAILED
    if timed_out or Outcome.TIMED_OUT in outcomes:
        return Outcome.TIMED_OUT
    measured = all(outcome is Outcome.MEASURED for outcome in outcomes)
    return Outcome.MEASURED if measured else Outcome.NOT_RUN


class Figures(NamedTuple):
    """What was measured, by the names of metrics: of each node, and of each node in each round.

    `by_node` has what says something about the node, one value per group that it was in, by round;
    `by_round` has all, by a round's number and a node's name. A value that was not measured is not
    there.
    """

    by_node: Mapping[str, Mapping[str, tuple[float, ...]]]
    by_round: Mapping[tuple[int, str], Mapping[str, float]]


def figures_of(samples: Iterable[Sampled], verdict: VerdictReached | None = None) -> Figures:
    """Return the figures of a run, each as `Timed.value` has it.

    A healthy node's figure with a bad partner, or over a bad path, says nothing about the node,
    so such groups are left out of it where the whole group was measured together.

    Args:
        samples: all samples of the run, of all nodes.
        verdict: says which nodes and paths are well, None while there is none.
    """
    judged, bad = (verdict.nodes, verdict.paths) if verdict else ([], [])
    fit = {one.node for one in judged if one.level is Level.HEALTHY}
    paths = [frozenset(path.ends) for path in bad]
    values: dict[str, dict[str, list[float]]] = {}
    by_round: dict[tuple[int, str], dict[str, float]] = {}
    for number, members, group in _groups(samples):
        all_well = members <= fit and not any(ends <= members for ends in paths)
        for timed in _whole(group_times(members, group)):
            value = timed.value
            if value is None:
                continue
            node, probe = timed.sample.node, str(timed.sample.metric)
            by_round.setdefault((number, node), {})[probe] = value
            if all_well or not timed.together or node not in fit:
                values.setdefault(node, {}).setdefault(probe, []).append(value)
    by_node = {
        node: {probe: tuple(probes[probe]) for probe in sorted(probes)}
        for node, probes in values.items()
    }
    return Figures(by_node, by_round)


_Group = tuple[int, frozenset[str], list[Sampled]]


def _groups(samples: Iterable[Sampled]) -> list[_Group]:
    """Return the members of each group of each round with their samples, round by round."""
    groups: dict[tuple[int, frozenset[str]], list[Sampled]] = {}
    for sample in samples:
        groups.setdefault((sample.round, frozenset(sample.group)), []).append(sample)
    in_order = sorted(groups.items(), key=lambda item: item[0][0])
    return [(number, members, group) for (number, members), group in in_order]


def _whole(times: Iterable[Timed]) -> Iterable[Timed]:
    """Return the times of whole nodes: that of the slowest of a node's devices or rails."""
    slowest: dict[tuple[str, Metric, bool], Timed] = {}
    for timed in times:
        key = timed.sample.node, timed.sample.metric, timed.together
        if key not in slowest or timed.own_ms > slowest[key].own_ms:
            slowest[key] = timed
    return slowest.values()
