# SPDX-License-Identifier: Apache-2.0
"""The times of each metric: which of them can be compared, and what they say.

Compute and network times are never added: each metric is inferred by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from slurm_health.preflight.localize.belief_propagation import Floats, Ints
from slurm_health.preflight.localize.evidence import Trial
from slurm_health.preflight.localize.fabric import Fabric, Sources
from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.preflight.localize.slowness import Observations, Slowness, infer
from slurm_health.records import probe_catalog

_LEAST_OF_A_KIND = 3  # fewer tests of a kind say nothing, there is nothing to compare them with
_KIND_TESTS = 24  # tests of one kind in one round that give the round its own baseline

_Row = tuple[
    int, float, Ints | tuple[int], bool
]  # number of the trial, time, sources, whether leaves differ


_OUTSIDE = 4.0  # deviations from the middle: of 100,000 devices that are well three lie beyond
_LEAST_DEVICES = 8  # of fewer the deviation says little: what the kind usually differs by counts
_MAD_TO_DEVIATION = 1.4826  # of normally distributed values


@dataclass(frozen=True, kw_only=True)
class MetricEvidence:
    """One metric's observations and what they say; `trial` and `round` are those of each.

    `floor` is the smallest slowdown that makes a node slow here, given how devices differ.
    """

    name: probe_catalog.Metric
    shared: bool
    floor: float
    data: Observations
    trial: Ints
    round: Ints
    found: Slowness

    def typical_excess(self, node: int) -> float:
        """Return the median log-excess of a node's own tests, 0 where there are none."""
        return self._typical.get(node, 0.0)

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
    shared = {name for trial in trials for name in trial.shared_ms}
    for name in sorted(shared):
        rows = [
            (index, trial.shared_ms[name], sources.table[index], fabric.crosses(trial.nodes))
            for index, trial in enumerate(trials)
            if name in trial.shared_ms
        ]
        yield _metric(name, rows, trials, sources, odds, settings)
    own = sorted({name for trial in trials for name in trial.node_ms})
    for _, parts in groupby(own, key=_whole):
        found = {name: rows for name in parts if (rows := _own_rows(name, trials))}
        if not found:
            continue
        peers = _population(list(found.values()), trials, settings)
        for name, rows in found.items():
            yield _metric(name, rows, trials, sources, odds, settings, peers)


def _whole(name: probe_catalog.Metric) -> probe_catalog.Metric:
    """Return the metric of all parts of a node: their devices are one population."""
    return replace(name, part="")


def _own_rows(name: probe_catalog.Metric, trials: Sequence[Trial]) -> list[_Row]:
    return [
        (index, ms, (node,), False)
        for index, trial in enumerate(trials)
        for node, ms in sorted(trial.node_ms.get(name, {}).items())
    ]


def _population(
    parts: Sequence[Sequence[_Row]], trials: Sequence[Trial], settings: LocalizeSettings
) -> Population:
    """Return what devices have in common; each part of the nodes has its rows.

    Where nodes have one device each, its times and the population's are the same.
    """
    tests = [
        (ms, int(source[0]) * len(parts) + part, trials[index].round_index)
        for part, rows in enumerate(parts)
        for index, ms, source, _ in rows
    ]
    times_ms, devices, rounds = (np.array(column) for column in zip(*tests, strict=True))
    return population_of(np.log(times_ms), devices, rounds, settings.compute_floor)


def _metric(
    name: probe_catalog.Metric,
    rows: Sequence[_Row],
    trials: Sequence[Trial],
    sources: Sources,
    odds: Floats,
    settings: LocalizeSettings,
    peers: Population | None = None,
) -> MetricEvidence:
    floor = peers.floor if peers else settings.network_floor
    trial = np.array([row[0] for row in rows], dtype=np.int64)
    rounds = np.array([trials[index].round_index for index in trial], dtype=np.int64)
    crossing = np.array([row[3] for row in rows], dtype=np.int64)
    kind = _kinds(rounds, crossing)
    kept = _comparable(kind)
    data = Observations(
        log_ms=np.log(np.array([row[1] for row in rows]))[kept],
        sources=np.array([row[2] for row in rows], dtype=np.int64)[kept],
        kind=np.unique(kind[kept], return_inverse=True)[1].reshape(-1).astype(np.int64),
        nodes=sources.nodes,
        variables=sources.variables,
        first_path=sources.nodes + sources.leaves,
        least=peers.middle if peers and name.part else float("-inf"),
        ceiling=_ceiling(name, settings),
    )
    found = infer(data, odds, floor, settings.noise)
    return MetricEvidence(
        name=name,
        shared=peers is None,
        floor=floor,
        data=data,
        trial=trial[kept],
        round=rounds[kept],
        found=found,
    )


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

    `floor` is the smallest relative slowdown that puts one outside the others; `middle` the
    log-time that half of them do not exceed.
    """

    floor: float
    middle: float


def population_of(log_ms: Floats, devices: Ints, rounds: Ints, floor: float) -> Population:
    """Return what is known of devices from the time, the device and the round of every test.

    The floor is never less than `floor`, which stands for what devices of the kind usually differ
    by: a few devices may happen to be alike.
    """
    typical = _typical(log_ms, devices, rounds)
    outside = _OUTSIDE * _deviation(typical) if len(typical) >= _LEAST_DEVICES else 0.0
    return Population(floor=max(floor, float(np.expm1(outside))), middle=middle(log_ms))


def _typical(log_ms: Floats, devices: Ints, rounds: Ints) -> Floats:
    """Return how far each device typically lies from the middle of its round."""
    above = log_ms.copy()
    for number in np.unique(rounds):
        above[rounds == number] -= middle(log_ms[rounds == number])
    return middle_of_each(above, devices)[1]


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
