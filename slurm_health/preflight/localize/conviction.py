# SPDX-License-Identifier: Apache-2.0
"""Who is convicted, and by which tests.

A high probability is not enough. A node must have failed, or been slow, with at least two
different partners who are themselves believed to be well; and over everybody who is convicted
in a run, the probabilities of error add up to no more than the run may risk. Among these is that a
healthy node lies so far out by chance: of many nodes the most unlucky one lies further out than of
few.
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

TRUST = 0.05  # who is bad with a smaller probability than this is believed as a witness
_CANDIDATE = 0.5  # below this probability nobody is looked at
_WITNESSES = 2  # partners, or rounds where there are no partners
_FABRIC_ROUNDS = 3  # in which a leaf or path was slow: congestion may last for two
_SLOW_TESTS = 3  # that convict: among thousands of nodes somebody is hit by a spike twice
_TOO_FEW_PEERS, _SLOW_TESTS_OF_TWO = 2, 6  # a single peer may be the odd one itself
_CONTROLS = 2  # rounds in which others were fast: one can be fast by luck
_MARGIN = 1.3  # deviations of a slowdown above the floor
_SPIKE = 3.0  # deviations above the middle of a node's tests: what lies beyond is no noise of them


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
    """Return who provably makes groups fail, or fails by itself."""
    witnessed = _failures_with_trusted(trials, sources, bad)
    took_part = {node for trial in trials for node in trial.nodes if node not in trial.silent}
    software = 2 * len(crashes) > len(took_part)  # what breaks most nodes is not a node
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


def _failures_with_trusted(
    trials: Sequence[Trial], sources: Sources, bad: Floats
) -> dict[int, list[int]]:
    """Return for each variable the failed trials in which everything else is believed well."""
    passed = {
        node
        for trial in trials
        if trial.bearing is Bearing.PASSED and len(trial.nodes) > 1
        for node in trial.nodes
    }
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
    return witnessed


def slow(
    trials: Sequence[Trial],
    metrics: Sequence[MetricEvidence],
    sources: Sources,
    failing_ones: Mapping[int, object],
    held: AbstractSet[int],
    settings: LocalizeSettings,
) -> tuple[dict[int, tuple[Guilt, ...]], frozenset[int]]:
    """Return who is provably slower than the floor, in which metrics; and who but for a control.

    When a node was slow its whole round may have been: the cluster is not always equally quiet. So
    others must have been fast beside it, or since, and not only once. No network of a node in
    `held` is convicted.
    """
    candidates: list[tuple[float, int, Guilt]] = []
    uncontrolled = set()
    compared = sources.nodes * len(metrics)
    for metric in metrics:
        for variable in np.flatnonzero(metric.found.slow >= _CANDIDATE):
            number = int(variable)
            tests = slow_tests(metric, number)
            if (
                number in failing_ones
                or (metric.shared and number in held)
                or not _beyond_floor(metric, number, len(tests))
                or not _enough(trials, metric, sources, number, tests)
            ):
                continue
            if number < sources.nodes and not _controlled(metric, number, tests):
                uncontrolled.add(number)
                continue
            probability = float(metric.found.slow[number]) - compared * _chance(metric, number)
            candidates.append((probability, number, Guilt(probability, metric, tests)))
    return _within_budget(candidates, settings.error), frozenset(uncontrolled)


def _beyond_floor(metric: MetricEvidence, variable: int, tests: int) -> bool:
    """Tell whether the slowdown exceeds the floor by more than the tests could err."""
    margin = _MARGIN * metric.found.noise / float(np.sqrt(max(tests, 1)))
    return bool(metric.found.effect[variable] >= np.log1p(metric.floor) + margin)


def _chance(metric: MetricEvidence, variable: int) -> float:
    """Return the probability that a healthy one lies as far out as this one.

    It lies where healthy ones differ for good, and where the noise of its tests takes it. Times as
    many as are compared, that is how many of them do so in a run, on average (Bonferroni).
    """
    rows, places = metric.tests_of(variable)
    own = metric.found.excess[rows[metric.found.others[rows, places] >= 1 - TRUST]]
    noise = metric.found.noise
    steady = own[own <= np.median(own) + _SPIKE * noise]
    deviation = math.hypot(metric.spread, noise / math.sqrt(len(steady)))
    return math.erfc(float(np.mean(steady)) / deviation / math.sqrt(2)) / 2


def slow_tests(metric: MetricEvidence, variable: int) -> tuple[int, ...]:
    """Return the observations in which only this variable can have been slow, and was.

    Where others had the processors, a test shows what is slow by more than that.
    """
    rows, places = metric.tests_of(variable)
    limit = max(float(metric.found.effect[variable]), float(np.log1p(metric.floor))) / 2
    floors = metric.floors[rows]
    limits = np.where(floors > metric.floor, np.maximum(np.log1p(floors), limit), limit)
    slow = metric.found.excess[rows] >= limits
    clear = (metric.found.others[rows, places] >= 1 - TRUST) & slow
    return tuple(int(row) for row in rows[clear])


def _controlled(metric: MetricEvidence, node: int, tests: Sequence[int]) -> bool:
    """Tell whether others were fast in rounds in which the node was slow, or in later ones.

    Not needed where it is known what good hardware takes.
    """
    if np.isfinite(metric.data.ceiling):
        return True
    fast = metric.found.excess < metric.found.effect[node] / 2
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
    """Tell whether the slow tests are many and different enough to convict."""
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
    for probability, variable, guilt in sorted(candidates, key=lambda found: (-found[0], found[1])):
        spent += 1 - probability
        if spent > error:
            break
        chosen[variable] = (*chosen.get(variable, ()), guilt)
    return chosen
