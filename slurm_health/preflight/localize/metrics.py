# SPDX-License-Identifier: Apache-2.0
"""The times of each metric: which of them can be compared, and what they say.

Compute and network times are never added: each metric is inferred by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from slurm_health.preflight.localize.belief_propagation import Floats, Ints
from slurm_health.preflight.localize.evidence import Fabric, Sources, Trial
from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.preflight.localize.slowness import Observations, Slowness, infer
from slurm_health.records import probe_catalog

_LEAST_OF_A_KIND = 3  # fewer tests of a kind say nothing, there is nothing to compare them with
_LEAST_SERVED = 0.05  # the kernel's counts are no better
_KIND_TESTS = 24  # tests of one kind in one round that give the round its own baseline

_OUTSIDE = 4.0  # deviations from the middle: of 100,000 devices that are well three lie beyond
_LEAST_DEVICES = 8  # of fewer the deviation says little: what the kind usually differs by counts
_MAD_TO_DEVIATION = 1.4826  # of normally distributed values
# Of many normal values the narrowest range with half of them (the shorth: Andrews et al., Robust
# Estimates of Location, 1972) is so many deviations wide; of n values it is narrower by this over
# sqrt(n), in 4,000 draws each of 16 to 2,048 values.
_HALF_OF_NORMAL, _NARROW = 1.349, 0.95
_ODD = 3.0  # deviations from the middle; what lies beyond is no part of what is usual
_MAD_ERROR = 1.17  # deviation of a MAD of n normal values, in deviations of them over sqrt(n)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The tests of one metric: the number of the trial of each, and whether it crossed leaves.

    `floors` is the smallest slowdown that each of them can show.
    """

    trial: Ints
    log_ms: Floats
    sources: Ints
    crossing: Ints
    floors: Floats


@dataclass(frozen=True, kw_only=True)
class MetricEvidence:
    """One metric's observations and what they say; `trial` and `round` are those of each.

    `floors` is the smallest slowdown that each can show, given who else used its processors.
    `floor` is the smallest slowdown that makes a node slow here, given how devices differ: `spread`
    is the deviation of what healthy ones differ by for good, 0 where that is not told from noise.
    """

    name: probe_catalog.Metric
    shared: bool
    floor: float
    spread: float
    floors: Floats
    data: Observations
    trial: Ints
    round: Ints
    found: Slowness

    def typical_excess(self, node: int) -> float:
        """Return the median log-excess of a node's own tests, 0 where there are none."""
        return self._typical.get(node, 0.0)

    def tests_of(self, variable: int) -> tuple[Ints, Ints]:
        """Return the tests of a variable in their order, and its place in each."""
        order, begins = self._by_variable
        own = order[begins[variable] : begins[variable + 1]]
        rows, places = np.divmod(own, self.data.sources.shape[1])
        return rows, places

    @cached_property
    def _by_variable(self) -> tuple[Ints, Ints]:
        """All places in the tests, ordered by their variable, and where those of each begin."""
        order = np.argsort(self.data.sources, axis=None, kind="stable")
        in_order = self.data.sources.ravel()[order]
        return order, np.searchsorted(in_order, np.arange(self.data.variables + 1))

    @cached_property
    def middle_noise(self) -> float:
        """The relative noise of a test, by the narrowest range that holds half of them.

        Slow nodes, up to half of the tests, are outside of it: they do not enter it as they do the
        estimate of a run with few tests, or a deviation from the middle of all.
        """
        ordered = np.sort(self.found.excess)
        half = (len(ordered) + 1) // 2
        narrowest = float(np.min(ordered[half:] - ordered[:-half], initial=np.inf))
        if not np.isfinite(narrowest):
            return self.found.noise
        return narrowest / _HALF_OF_NORMAL * (1 + _NARROW / math.sqrt(len(ordered)))

    @cached_property
    def fastest(self) -> tuple[Ints, Floats, Ints]:
        """The nodes that were tested, the least log-excess of each and how many tests it had."""
        nodes = self.data.sources
        tested = (nodes >= 0) & (nodes < self.data.nodes)
        owners = nodes[tested]
        excess = np.broadcast_to(self.found.excess[:, None], nodes.shape)[tested]
        order = np.lexsort((excess, owners))
        present, first, tests = np.unique(owners[order], return_index=True, return_counts=True)
        return present, excess[order][first], tests

    @cached_property
    def _typical(self) -> dict[int, float]:
        """The median of every node, in one pass."""
        nodes, medians = middle_of_each(self.found.excess, self.data.sources[:, 0])
        return dict(zip(nodes.tolist(), medians.tolist(), strict=True))


def metrics_of(
    trials: Sequence[Trial],
    fabric: Fabric,
    sources: Sources,
    odds: Floats,
    settings: LocalizeSettings,
) -> Iterable[MetricEvidence]:
    """Return what the times of each metric say."""
    rounds = np.array([trial.round_index for trial in trials], dtype=np.int64)
    for name in sorted({name for trial in trials for name in trial.shared_ms}):
        rows = _shared_rows(name, trials, fabric, sources, settings)
        yield _metric(name, rows, rounds[rows.trial], sources, odds, settings)
    own = sorted({name for trial in trials for name in trial.node_ms})
    for _, parts in groupby(own, key=_whole):
        told = {name: _own_rows(name, trials, settings) for name in parts}
        found = {name: rows for name, rows in told.items() if len(rows.trial)}
        if not found:
            continue
        peers = _population(list(found.values()), rounds, settings)
        for name, rows in found.items():
            yield _metric(name, rows, rounds[rows.trial], sources, odds, settings, peers)


def _whole(name: probe_catalog.Metric) -> probe_catalog.Metric:
    """Return the metric of all parts of a node: their devices are one population."""
    return replace(name, part="")


def _shared_rows(
    name: probe_catalog.Metric,
    trials: Sequence[Trial],
    fabric: Fabric,
    sources: Sources,
    settings: LocalizeSettings,
) -> _Rows:
    chosen = [index for index, trial in enumerate(trials) if name in trial.shared_ms]
    return _Rows(
        trial=np.array(chosen, dtype=np.int64),
        log_ms=np.log(np.array([trials[index].shared_ms[name] for index in chosen])),
        sources=sources.table[chosen],
        crossing=np.array([fabric.crosses(trials[index].nodes) for index in chosen], np.int64),
        floors=np.array(
            [_crowded_floor(settings.network_floor, trials[index].served) for index in chosen]
        ),
    )


def _own_rows(
    name: probe_catalog.Metric, trials: Sequence[Trial], settings: LocalizeSettings
) -> _Rows:
    """Return the tests of nodes by themselves, ordered by node and then by trial."""
    times = [trial.node_ms.get(name, {}) for trial in trials]
    nodes = np.array([node for each in times for node in each], dtype=np.int64)
    log_ms = np.log(np.array([ms for each in times for ms in each.values()], dtype=np.float64))
    trial = np.repeat(np.arange(len(trials)), [len(each) for each in times])
    order = np.argsort(nodes, kind="stable")
    return _Rows(
        trial=trial[order],
        log_ms=log_ms[order],
        sources=nodes[order][:, None],
        crossing=np.zeros_like(nodes),
        floors=np.full(len(nodes), settings.compute_floor),
    )


def _population(parts: Sequence[_Rows], rounds: Ints, settings: LocalizeSettings) -> Population:
    """Return what devices have in common; each part of the nodes has its rows.

    Where nodes have one device each, its times and the population's are the same.
    """
    return population_of(
        np.concatenate([rows.log_ms for rows in parts]),
        np.concatenate([rows.sources[:, 0] * len(parts) + part for part, rows in enumerate(parts)]),
        np.concatenate([rounds[rows.trial] for rows in parts]),
        settings.compute_floor,
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
    kept = _comparable(kind)
    data = Observations(
        log_ms=rows.log_ms[kept],
        sources=rows.sources[kept],
        kind=np.unique(kind[kept], return_inverse=True)[1].reshape(-1).astype(np.int64),
        nodes=sources.nodes,
        variables=sources.variables,
        first_path=sources.nodes + sources.leaves,
        least=peers.middle if peers and name.part else float("-inf"),
        ceiling=_ceiling(name, settings),
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
        found=infer(data, odds, floor, settings.noise),
    )


def _crowded_floor(floor: float, served: float) -> float:
    """Return the smallest slowdown of what nodes do together that a test of them can show.

    Who has its processors for a share of the time answers so much later, now or then: where others
    have most nodes' processors for a while, healthy pairs differ by that. Of a node's own work
    it can be told and left out; of an exchange, in which each waits for the other's threads and
    both for those of the kernel, not. Where most tests are so, so is the metric.
    """
    return max(floor, 1 / max(served, _LEAST_SERVED) - 1)


def _kinds(rounds: Ints, crossing: Ints) -> Ints:
    """Return which observations share a baseline: inside or across leaves, per round if many.

    A round with few tests of a side shares the baseline of the last round that had many.
    """
    kind = np.full(len(rounds), -1, dtype=np.int64)
    kinds = 0
    for side in (0, 1):
        here = crossing == side
        own = [r for r in np.unique(rounds[here]) if (here & (rounds == r)).sum() >= _KIND_TESTS]
        for begin, end in pairwise([-1, *own[1:], int(rounds.max()) + 1]):
            chosen = here & (rounds >= begin) & (rounds < end)
            kind[chosen] = kinds
            kinds += 1
    _, kind = np.unique(kind, return_inverse=True)
    return kind.reshape(-1).astype(np.int64)


def _comparable(kind: Ints) -> npt.NDArray[np.bool_]:
    """Tell which observations have enough of their kind to be compared with."""
    counts = np.bincount(kind)
    return (counts[kind] >= _LEAST_OF_A_KIND) | (len(counts) == 1)


def _ceiling(name: probe_catalog.Metric, settings: LocalizeSettings) -> float:
    """Return the largest baseline that is believed, from what good hardware is known to take."""
    expected = settings.expected_ms.get(str(replace(name, part="")))
    return float("inf") if expected is None else float(np.log(expected * settings.expected_slack))


@dataclass(frozen=True, kw_only=True)
class Population:
    """The devices of a run that can be compared.

    `spread` is the deviation of what they differ by for good. `floor` is the smallest relative
    slowdown that puts one outside the others, `middle` the log-time that half do not exceed.
    """

    spread: float
    floor: float
    middle: float


def population_of(log_ms: Floats, devices: Ints, rounds: Ints, floor: float) -> Population:
    """Return what is known of devices from the time, the device and the round of every test.

    The floor is never less than `floor`, which stands for what devices of the kind usually differ
    by: a few devices may happen to be alike.
    """
    spread = lasting_spread(*_relative(log_ms, devices, rounds))
    floor = max(floor, float(np.expm1(_OUTSIDE * spread)))
    return Population(spread=spread, floor=floor, middle=middle(log_ms))


def lasting_spread(above: Floats, devices: Ints) -> float:
    """Return the deviation of what devices differ by for good, of their tests in order of rounds.

    The variance of the means of the devices is the lasting one plus that of a test over the number
    of tests (one-way analysis of variance, Searle et al., Variance Components, 1992, chapter 3).
    What two tests of one device differ by shows the second, by a median, which spikes do not
    move; a few odd devices, which may be slow ones, are left out of the first. What is returned is
    larger than the estimate by one standard error. With one test of each device nothing repeats,
    and everything counts as lasting; 0 for too few devices.
    """
    order = np.argsort(devices, kind="stable")
    above, devices = above[order], devices[order]
    _, owner, tests = np.unique(devices, return_inverse=True, return_counts=True)
    if len(tests) < _LEAST_DEVICES:
        return 0.0
    means = np.bincount(owner, weights=above) / tests
    usual = np.abs(means - middle(means)) <= _ODD * _deviation(means)
    total, error = float(np.var(means[usual])), float(np.sqrt(2 / usual.sum()))
    steps = np.diff(above)[np.diff(owner) == 0]
    if not len(steps):
        return float(np.sqrt(total * (1 + error)))
    passing = (_MAD_TO_DEVIATION * middle(np.abs(steps))) ** 2 / 2 * float(np.mean(1 / tests))
    errors = np.hypot(total * error, passing * 2 * _MAD_ERROR / np.sqrt(len(steps)))
    return float(np.sqrt(max(total - passing, 0.0) + errors))


def _relative(log_ms: Floats, devices: Ints, rounds: Ints) -> tuple[Floats, Ints]:
    """Return how far each test lies from the middle of its round, and its device, by rounds."""
    order = np.argsort(rounds, kind="stable")
    above, devices, rounds = log_ms[order], devices[order], rounds[order]
    for number in np.unique(rounds):
        above[rounds == number] -= middle(above[rounds == number])
    return above, devices


def _deviation(values: Floats) -> float:
    return _MAD_TO_DEVIATION * middle(np.abs(values - middle(values)))


def middle(values: Floats) -> float:
    """Return the median; of an even number the lower one, so that half of them may be high."""
    return float(np.sort(values)[(len(values) - 1) // 2])


def middle_of_each(values: Floats, owners: Ints) -> tuple[Ints, Floats]:
    """Return who has any of these values, and the median of each one's own, as `middle` has it."""
    order = np.lexsort((values, owners))
    present, starts, counts = np.unique(owners[order], return_index=True, return_counts=True)
    return present, values[order][starts + (counts - 1) // 2]
