# SPDX-License-Identifier: Apache-2.0
"""The times of each metric: which of them are comparable, and what they show.

Compute and network times are never added: the inference runs once per metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np
from msgspec.structs import replace

from slurm_health.preflight.localize.belief_propagation import NONE, Floats, Ints
from slurm_health.preflight.localize.evidence import Fabric, Sources, Trial
from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.preflight.localize.slowness import Observations, Slowness, infer
from slurm_health.records import probe_catalog

_LEAST_OF_A_KIND = 3  # fewer tests of a kind have nothing to be compared with
_LEAST_SERVED = 0.05  # the kernel's counts are no better
_KIND_TESTS = 24  # tests of one kind in one round that give the round its own baseline

_OUTSIDE = 4.0  # deviations from the middle: of 100,000 healthy devices three lie beyond
_LEAST_DEVICES = 8  # fewer give no usable deviation: what the kind usually differs by counts
_MAD_TO_DEVIATION = 1.4826  # of normally distributed values
# Of many normal values the narrowest range with half of them (the shorth: Andrews et al., Robust
# Estimates of Location, 1972) is so many deviations wide; of n values it is narrower by this over
# sqrt(n), in 4,000 draws each of 16 to 2,048 values.
_HALF_OF_NORMAL, _NARROW = 1.349, 0.95
_ODD = 3.0  # deviations from the middle; values beyond are unusual
_MAD_ERROR = 1.17  # deviation of a MAD of n normal values, in deviations of them over sqrt(n)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The tests of a metric: the trial of each, and whether it crossed leaves.

    `floors` is the smallest slowdown that each of them can show.
    """

    trial: Ints
    log_ms: Floats
    sources: Ints
    crossing: Ints
    floors: Floats


@dataclass(frozen=True, kw_only=True)
class MetricEvidence:
    """The observations of a metric and what they show; `trial` and `round` are those of each.

    `floors` is the smallest slowdown that each can show, given who else used its processors.
    `floor` is the smallest slowdown that makes a node slow, given how devices differ. `spread` is
    the deviation of the lasting differences of healthy ones, 0 if noise hides it.
    """

    name: probe_catalog.Metric
    shared: bool
    floor: float
    spread: float
    floors: Floats
    data: Observations
    trial: Ints
    round: Ints
    slowness: Slowness

    def typical_excess(self, node: int) -> float:
        """Return the median log-excess of a node's own tests, 0 if there are none."""
        return self._typical.get(node, 0.0)

    def tests_of(self, variable: int) -> tuple[Ints, Ints]:
        """Return the tests of a variable in their order, and its place in each."""
        order, begins = self._by_variable
        own = order[begins[variable] : begins[variable + 1]]
        rows, places = np.divmod(own, self.data.sources.shape[1])
        return rows, places

    @cached_property
    def _by_variable(self) -> tuple[Ints, Ints]:
        """All places in the tests in the order of their variables, and where each begins."""
        order = np.argsort(self.data.sources, axis=None, kind="stable")
        in_order = self.data.sources.ravel()[order]
        return order, np.searchsorted(in_order, np.arange(self.data.variables + 1))

    @cached_property
    def middle_noise(self) -> float:
        """The relative noise of a test, by the narrowest range that holds half of them.

        Slow nodes, up to half of the tests, lie outside of it and do not inflate it, as they do
        the estimate of a run with few tests, or a deviation from the middle of all.
        """
        ordered = np.sort(self.slowness.excess)
        half = (len(ordered) + 1) // 2
        narrowest = float(np.min(ordered[half:] - ordered[:-half], initial=np.inf))
        if not np.isfinite(narrowest):
            return self.slowness.noise
        return narrowest / _HALF_OF_NORMAL * (1 + _NARROW / math.sqrt(len(ordered)))

    @cached_property
    def fastest(self) -> tuple[Ints, Floats, Ints]:
        """The tested nodes, the least log-excess of each and its number of tests."""
        nodes = self.data.sources
        tested = (nodes >= 0) & (nodes < self.data.nodes)
        owners = nodes[tested]
        excess = np.broadcast_to(self.slowness.excess[:, None], nodes.shape)[tested]
        order = np.lexsort((excess, owners))
        present, first, tests = np.unique(owners[order], return_index=True, return_counts=True)
        return present, excess[order][first], tests

    @cached_property
    def _typical(self) -> dict[int, float]:
        """The median of each node as `middle` takes it, in one pass."""
        values, owners = self.slowness.excess, self.data.sources[:, 0]
        order = np.lexsort((values, owners))
        nodes, starts, counts = np.unique(owners[order], return_index=True, return_counts=True)
        medians = values[order][starts + (counts - 1) // 2]
        return dict(zip(nodes.tolist(), medians.tolist(), strict=True))


def metrics_of(
    trials: Sequence[Trial],
    fabric: Fabric,
    sources: Sources,
    odds: Floats,
    settings: LocalizeSettings,
) -> Iterable[MetricEvidence]:
    """Yield what the times of each metric show."""
    rounds = np.array([trial.round_index for trial in trials], dtype=np.int64)
    crossing = np.zeros_like(rounds)
    if fabric.known:
        crossing = (sources.table[:, 2] != NONE).astype(np.int64)
    for name in sorted({name for trial in trials for name in trial.shared_ms}):
        chosen = [index for index, trial in enumerate(trials) if name in trial.shared_ms]
        # A node that has its processors for a share of the time answers so much later, now or then.
        # Its own work shows the lost time, an exchange does not: each node waits for the other. So
        # while others have most nodes' processors, healthy pairs differ by that.
        served = np.array([max(trials[index].served, _LEAST_SERVED) for index in chosen])
        rows = _Rows(
            trial=np.array(chosen, dtype=np.int64),
            log_ms=np.log(np.array([trials[index].shared_ms[name] for index in chosen])),
            sources=sources.table[chosen],
            crossing=crossing[chosen],
            floors=np.maximum(settings.network_floor, 1 / served - 1),
        )
        yield _metric(name, rows, rounds[rows.trial], sources, odds, settings)
    own = sorted({name for trial in trials for name in trial.node_ms})
    for _, parts in groupby(own, key=lambda name: replace(name, part="")):
        by_part = {name: _own_rows(name, trials, settings) for name in parts}
        by_part = {name: rows for name, rows in by_part.items() if len(rows.trial)}
        if not by_part:
            continue
        # All parts of the nodes are one population. If nodes have one device each, so are they.
        every = enumerate(by_part.values())
        devices = [rows.sources[:, 0] * len(by_part) + part for part, rows in every]
        peers = population_of(
            np.concatenate([rows.log_ms for rows in by_part.values()]),
            np.concatenate(devices),
            np.concatenate([rounds[rows.trial] for rows in by_part.values()]),
            settings.compute_floor,
        )
        for name, rows in by_part.items():
            yield _metric(name, rows, rounds[rows.trial], sources, odds, settings, peers)


def _own_rows(
    name: probe_catalog.Metric, trials: Sequence[Trial], settings: LocalizeSettings
) -> _Rows:
    """Return the tests of nodes by themselves, ordered by node and then by trial."""
    times = [trial.node_ms.get(name, {}) for trial in trials]
    nodes = np.array([node for by_node in times for node in by_node], dtype=np.int64)
    log_ms = np.log(
        np.array([ms for by_node in times for ms in by_node.values()], dtype=np.float64)
    )
    trial = np.repeat(np.arange(len(trials)), [len(by_node) for by_node in times])
    order = np.argsort(nodes, kind="stable")
    return _Rows(
        trial=trial[order],
        log_ms=log_ms[order],
        sources=nodes[order][:, None],
        crossing=np.zeros_like(nodes),
        floors=np.full(len(nodes), settings.compute_floor),
    )


def _metric(
    name: probe_catalog.Metric,
    rows: _Rows,
    rounds: Ints,
    sources: Sources,
    odds: Floats,
    settings: LocalizeSettings,
    peers: Population | None = None,
) -> MetricEvidence:
    floor = peers.floor if peers else middle(rows.floors)
    kind = _kinds(rounds, rows.crossing)
    counts = np.bincount(kind)
    kept = counts[kind] >= min(_LEAST_OF_A_KIND, int(counts.max()))
    expected_ms = settings.expected_ms.get(str(replace(name, part="")), math.inf)
    data = Observations(
        log_ms=rows.log_ms[kept],
        sources=rows.sources[kept],
        kind=np.unique(kind[kept], return_inverse=True)[1].reshape(-1).astype(np.int64),
        nodes=sources.nodes,
        variables=sources.variables,
        first_path=sources.nodes + sources.leaves,
        least=peers.middle if peers and name.part else float("-inf"),
        ceiling=float(np.log(expected_ms * settings.expected_slack)),
    )
    return MetricEvidence(
        name=name,
        shared=peers is None,
        floor=floor,
        spread=peers.spread if peers else 0.0,
        floors=rows.floors[kept],
        data=data,
        trial=rows.trial[kept],
        round=rounds[kept],
        slowness=infer(data, odds, floor, settings.noise),
    )


def _kinds(rounds: Ints, crossing: Ints) -> Ints:
    """Return which observations share a baseline: inside or across leaves, per round if many.

    A round with few tests of a side shares the baseline of the last round that had many.
    """
    kind = np.full(len(rounds), -1, dtype=np.int64)
    kinds = 0
    for side in (0, 1):
        here = crossing == side
        own = np.flatnonzero(np.bincount(rounds[here]) >= _KIND_TESTS)
        for begin, end in pairwise([-1, *own[1:], int(rounds.max()) + 1]):
            chosen = here & (rounds >= begin) & (rounds < end)
            kind[chosen] = kinds
            kinds += 1
    _, kind = np.unique(kind, return_inverse=True)
    return kind.reshape(-1).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Population:
    """The comparable devices of a run.

    `spread` is the deviation of their lasting differences. `floor` is the smallest relative
    slowdown that puts one outside the others, `middle` the log-time that half do not exceed.
    """

    spread: float
    floor: float
    middle: float


def population_of(log_ms: Floats, devices: Ints, rounds: Ints, floor: float) -> Population:
    """Return the population of devices from the time, the device and the round of every test.

    The floor is never below `floor`, which stands for the usual difference of such devices: a few
    devices may happen to be alike.
    """
    order = np.argsort(rounds, kind="stable")
    above, by_round = log_ms[order], rounds[order]
    for number in np.flatnonzero(np.bincount(by_round)):  # np.unique would load numpy.ma
        above[by_round == number] -= middle(above[by_round == number])
    spread = lasting_spread(above, devices[order])
    floor = max(floor, float(np.expm1(_OUTSIDE * spread)))
    return Population(spread=spread, floor=floor, middle=middle(log_ms))


def lasting_spread(above: Floats, devices: Ints) -> float:
    """Return the deviation of the lasting differences of devices, from tests in order of rounds.

    The variance of the means of the devices is the lasting one plus that of a test over the number
    of tests (one-way analysis of variance, Searle et al., Variance Components, 1992, chapter 3).
    The differences of two tests of one device show the second, by a median, which spikes do not
    move. A few odd devices, which may be slow ones, are left out of the first. The result is larger
    than the estimate by one standard error. With one test of each device nothing repeats, and
    everything counts as lasting; 0 for too few devices.
    """
    order = np.argsort(devices, kind="stable")
    above, devices = above[order], devices[order]
    _, owner, tests = np.unique(devices, return_inverse=True, return_counts=True)
    if len(tests) < _LEAST_DEVICES:
        return 0.0
    means = np.bincount(owner, weights=above) / tests
    distance = np.abs(means - middle(means))
    usual = distance <= _ODD * _MAD_TO_DEVIATION * middle(distance)
    total, error = float(np.var(means[usual])), float(np.sqrt(2 / usual.sum()))
    steps = np.diff(above)[np.diff(owner) == 0]
    if not len(steps):
        return float(np.sqrt(total * (1 + error)))
    passing = (_MAD_TO_DEVIATION * middle(np.abs(steps))) ** 2 / 2 * float(np.mean(1 / tests))
    errors = np.hypot(total * error, passing * 2 * _MAD_ERROR / np.sqrt(len(steps)))
    return float(np.sqrt(max(total - passing, 0.0) + errors))


def middle(values: Floats) -> float:
    """Return the median; of an even number the lower one, so that half of them may be high."""
    return float(np.sort(values)[(len(values) - 1) // 2])
