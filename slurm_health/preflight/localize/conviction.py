# SPDX-License-Identifier: Apache-2.0
"""Which nodes, leaves and paths are convicted, and by which tests.

A high probability is not enough. A node must have failed, or been slow, with at least two
different partners that are believed to be well. Over all convictions of a run, the probabilities of
error add up to at most what the run may risk. Chance is one of these errors: the unluckiest of many
healthy nodes lies further out than the unluckiest of few.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from slurm_health.preflight.localize.belief_propagation import NONE, Floats
from slurm_health.preflight.localize.evidence import Bearing, Sources, Trial
from slurm_health.preflight.localize.metrics import MetricEvidence
from slurm_health.preflight.localize.settings import LocalizeSettings

TRUST = 0.05  # a node that is bad with a smaller probability is a credible witness
_CANDIDATE = 0.5  # the least probability of a candidate
_WITNESSES = 2  # partners, or rounds if there are no partners
_FABRIC_ROUNDS = 3  # in which a leaf or path was slow: congestion may last for two
_SLOW_TESTS = 3  # that convict: spikes hit some node of thousands twice
_TOO_FEW_PEERS, _SLOW_TESTS_OF_TWO = 2, 6  # a single peer may be the odd one itself
_CONTROLS = 2  # rounds in which others were fast: one can be fast by luck
_MARGIN = 1.3  # deviations of a slowdown above the floor
_SPIKE = 3.0  # deviations above the middle of a node's tests: further out is no noise of theirs


@dataclass(frozen=True)
class Guilt:
    """Why a variable is convicted: of failing (`metric` None), or of being slow in a metric."""

    probability: float
    metric: MetricEvidence | None
    tests: tuple[int, ...]  # rows of the metric's observations, or numbers of trials


def failing(
    trials: Sequence[Trial],
    sources: Sources,
    bad: Floats,
    crashes: Mapping[int, Sequence[int]],
    settings: LocalizeSettings,
) -> dict[int, tuple[Guilt, ...]]:
    """Return what provably makes groups fail, or fails by itself."""
    passed = {
        node
        for trial in trials
        if trial.bearing is Bearing.PASSED and len(trial.nodes) > 1
        for node in trial.nodes
    }
    # A failed trial counts against a variable if everything else in it is believed to be well.
    witnessed: dict[int, list[int]] = {}
    for index, trial in enumerate(trials):
        if trial.bearing is not Bearing.FAILED:
            continue
        row = [int(source) for source in sources.table[index] if source != NONE]
        doubtful = [
            source
            for source in row
            if bad[source] > TRUST or (source < sources.nodes and source not in passed)
        ]
        for variable in row if not doubtful else doubtful if len(doubtful) == 1 else ():
            witnessed.setdefault(variable, []).append(index)
    took_part = {node for trial in trials for node in trial.nodes if node not in trial.silent}
    software = 2 * len(crashes) > len(took_part)  # a cause that most nodes share is no node
    candidates: list[tuple[float, int, Guilt]] = []
    for variable in witnessed.keys() | crashes.keys():
        tests = witnessed.get(variable, [])
        alone = crashes.get(variable, ())
        groups = {trials[index].nodes for index in tests}
        probability = float(bad[variable])
        if len(groups) >= _WITNESSES or (len(alone) >= _WITNESSES and not software):
            guilt = Guilt(probability, None, tuple(sorted({*tests, *alone})))
            candidates.append((probability, variable, guilt))
    return _within_budget(candidates, settings.error)


def slow(
    trials: Sequence[Trial],
    metrics: Sequence[MetricEvidence],
    sources: Sources,
    failing_ones: Mapping[int, object],
    held: AbstractSet[int],
    settings: LocalizeSettings,
) -> tuple[dict[int, tuple[Guilt, ...]], frozenset[int]]:
    """Return what is provably slower than the floor, by metric, and which nodes lack a control.

    When a node was slow its whole round may have been: the cluster is not always equally quiet. So
    others must have been fast beside it, or since, and more than once. The network of a node in
    `held` is never convicted.
    """
    candidates: list[tuple[float, int, Guilt]] = []
    uncontrolled = set()
    compared = sources.nodes * len(metrics)
    for metric in metrics:
        for variable in np.flatnonzero(metric.slowness.slow >= _CANDIDATE):
            number = int(variable)
            tests = slow_tests(metric, number)
            noise = _MARGIN * metric.slowness.noise / float(np.sqrt(max(len(tests), 1)))
            if (
                number in failing_ones
                or (metric.shared and number in held)
                or metric.slowness.effect[number] < np.log1p(metric.floor) + noise
                or not _enough(trials, metric, sources, number, tests)
            ):
                continue
            if number < sources.nodes and not _controlled(metric, number, tests):
                uncontrolled.add(number)
                continue
            probability = float(metric.slowness.slow[number]) - compared * _chance(metric, number)
            candidates.append((probability, number, Guilt(probability, metric, tests)))
    return _within_budget(candidates, settings.error), frozenset(uncontrolled)


def _chance(metric: MetricEvidence, variable: int) -> float:
    """Return the probability that a healthy variable lies as far out as this one.

    Healthy ones differ for good, and the noise of their tests moves them further. Times the number
    of comparisons, that is how many lie so far out in a run, on average (Bonferroni).
    """
    rows, places = metric.tests_of(variable)
    own = metric.slowness.excess[rows[metric.slowness.others[rows, places] >= 1 - TRUST]]
    noise = metric.slowness.noise
    steady = own[own <= np.median(own) + _SPIKE * noise]
    deviation = math.hypot(metric.spread, noise / math.sqrt(len(steady)))
    return math.erfc(float(np.mean(steady)) / deviation / math.sqrt(2)) / 2


def slow_tests(metric: MetricEvidence, variable: int) -> tuple[int, ...]:
    """Return the slow observations in which only this variable can have been slow.

    While others have the processors, a test shows only what is slower than that.
    """
    rows, places = metric.tests_of(variable)
    limit = max(float(metric.slowness.effect[variable]), float(np.log1p(metric.floor))) / 2
    floors = metric.floors[rows]
    limits = np.where(floors > metric.floor, np.maximum(np.log1p(floors), limit), limit)
    is_slow = metric.slowness.excess[rows] >= limits
    clear = (metric.slowness.others[rows, places] >= 1 - TRUST) & is_slow
    return tuple(int(row) for row in rows[clear])


def _controlled(metric: MetricEvidence, node: int, tests: Sequence[int]) -> bool:
    """Return whether others were fast in the rounds in which the node was slow, or later.

    A known time of good hardware replaces a control.
    """
    if np.isfinite(metric.data.ceiling):
        return True
    fast = metric.slowness.excess < metric.slowness.effect[node] / 2
    fast &= metric.round >= metric.round[list(tests)].min()
    own, _ = metric.tests_of(node)
    fast[own] = False
    return int(np.count_nonzero(np.bincount(metric.round[fast]))) >= _CONTROLS


def _enough(
    trials: Sequence[Trial],
    metric: MetricEvidence,
    sources: Sources,
    variable: int,
    tests: Sequence[int],
) -> bool:
    """Return whether the slow tests are many and different enough to convict."""
    groups = {trials[metric.trial[test]].nodes for test in tests}
    rounds = {trials[metric.trial[test]].round_index for test in tests}
    needed = _SLOW_TESTS if sources.nodes > _TOO_FEW_PEERS else _SLOW_TESTS_OF_TWO
    if len(tests) < needed or len(rounds) < _WITNESSES:
        return False
    if variable >= sources.nodes:
        is_leaf = variable < sources.nodes + sources.leaves
        enough = _SLOW_TESTS if is_leaf else _WITNESSES
        return len(groups) >= enough and len(rounds) >= _FABRIC_ROUNDS
    return len(groups if metric.shared else rounds) >= _WITNESSES


def _within_budget(
    candidates: Iterable[tuple[float, int, Guilt]], error: float
) -> dict[int, tuple[Guilt, ...]]:
    """Return the surest candidates whose probabilities of error together stay below `error`."""
    chosen: dict[int, tuple[Guilt, ...]] = {}
    spent = 0.0
    for probability, variable, guilt in sorted(candidates, key=lambda c: (-c[0], c[1])):
        spent += 1 - probability
        if spent > error:
            break
        chosen[variable] = (*chosen.get(variable, ()), guilt)
    return chosen
