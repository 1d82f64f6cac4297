# SPDX-License-Identifier: Apache-2.0
"""Conclusions: what is proven, what is in doubt, which nodes are trusted, which pairs are bad."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from slurm_health.preflight.localize.belief_propagation import NONE, Floats, Graph, propagate
from slurm_health.preflight.localize.conviction import TRUST, Guilt, failing, slow
from slurm_health.preflight.localize.evidence import (
    Bearing,
    Fabric,
    Sources,
    Trial,
)
from slurm_health.preflight.localize.metrics import MetricEvidence
from slurm_health.preflight.localize.pairing import Pair
from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.preflight.localize.uplinks import Suspicion, infer_with_uplinks
from slurm_health.records.verdict import Level

_DOUBT = 0.5  # a node that is bad with at least this probability and not convicted is undecided
_OFTEN = 2  # one silence, crash or failure among tests that work happens to the best
_STRIKING = float(np.log(2.0))  # a single slow test is worth another round from this excess on
_BEYOND_NOISE = 4.0  # deviations
_TESTS, _TESTS_IF_LITTLE = 2, 4  # that prove a pair bad; congestion may strike a few in a row

_FAILS = np.array([0.002, 0.9, 0.999])  # probability to fail when well, flaky, dead
_TURNS, _TURNS_WITHOUT_PATHS = 12, 2  # at most, and of them at first
_SETTLED = 1e-7  # smaller changes of a probability change no verdict
_NEVER = -60.0  # log odds
_FLAKY, _FLAKY_PRIOR_NODES = 0.3, 4.0  # share of the bad nodes that are flaky, and its weight


class Doubt(Enum):
    """Why a run could not decide about a node."""

    SILENT = "it did not answer"
    CRASHED = "its own check crashed"
    SOFTWARE = "the checks of most nodes crashed"
    UNMEASURED = "no test shows anything about it"
    FAILED = "its groups failed, and no trusted node was in any of them"
    SLOW = "it may be slow"


@dataclass(frozen=True, kw_only=True)
class Conclusions:
    """Everything that follows from the results so far, by variable number."""

    trials: Sequence[Trial]
    fabric: Fabric
    sources: Sources
    bad: Floats  # probability to make groups fail
    metrics: tuple[MetricEvidence, ...]
    guilty: Mapping[int, tuple[Guilt, ...]]  # nodes, leaves and paths
    crashes: Mapping[int, tuple[int, ...]]  # node -> trials in which its own probe died
    silences: Mapping[int, tuple[int, ...]]
    passed: frozenset[int]  # nodes that were in a group that worked
    tested: frozenset[int]  # nodes about which any trial shows anything
    uncontrolled: frozenset[int]  # slow, but perhaps all nodes were at the time
    suspicion: Suspicion  # what slow nodes may have in common
    risk: Floats

    @cached_property
    def _took_part(self) -> dict[int, tuple[int, ...]]:
        return _by_node((index, trial.nodes) for index, trial in enumerate(self.trials))

    def trials_of(self, node: int) -> list[Trial]:
        """Return the trials with a node, in order."""
        return [self.trials[index] for index in self._took_part.get(node, ())]

    @property
    def expected_of_pairs(self) -> bool:
        """Whether the config file gives the time that a pair takes on good hardware."""
        return any(metric.shared and np.isfinite(metric.data.ceiling) for metric in self.metrics)

    @cached_property
    def trusted(self) -> frozenset[int]:
        """The nodes that passed a test and are believed to be well in every respect."""
        believed = np.flatnonzero(self.risk[: self.sources.nodes] <= TRUST)
        return self.passed.intersection(believed.tolist()) - self.guilty.keys()


def judge(
    trials: Sequence[Trial],
    fabric: Fabric,
    prior: Mapping[int, float],
    settings: LocalizeSettings,
) -> Conclusions:
    """Return what these trials prove and what they leave open."""
    inferred, suspicion = infer_with_uplinks(trials, fabric, prior, settings)
    fabric, sources, odds, metrics = inferred
    bad = infer_hard(trials, sources, odds, alone=settings.alone)
    crashes = _by_node((index, trial.crashed) for index, trial in enumerate(trials))
    guilty = failing(trials, sources, bad, crashes, settings)
    slow_ones, uncontrolled = slow(trials, metrics, sources, guilty, suspicion.held, settings)
    for variable, guilt in slow_ones.items():
        guilty[variable] = (*guilty.get(variable, ()), *guilt)
    risk = bad.copy()
    for metric in metrics:
        risk = np.maximum(risk, metric.slowness.beyond)
    passed = {node for t in trials if t.bearing is Bearing.PASSED for node in t.nodes}
    tested = {node for t in trials if t.bearing is not Bearing.UNKNOWN for node in t.nodes}
    return Conclusions(
        trials=trials,
        fabric=fabric,
        sources=sources,
        bad=bad,
        metrics=metrics,
        guilty=guilty,
        crashes=crashes,
        silences=_by_node((index, trial.silent) for index, trial in enumerate(trials)),
        passed=frozenset(passed),
        tested=frozenset(tested | crashes.keys()),
        uncontrolled=uncontrolled - guilty.keys(),
        suspicion=suspicion,
        risk=risk,
    )


def _by_node(mentions: Iterable[tuple[int, Sequence[int]]]) -> dict[int, tuple[int, ...]]:
    """Return for each node the trials that mention it."""
    trials: dict[int, list[int]] = {}
    for index, nodes in mentions:
        for node in nodes:
            trials.setdefault(node, []).append(index)
    return {node: tuple(indexes) for node, indexes in trials.items()}


def doubt_of(findings: Conclusions, node: int) -> Doubt | None:
    """Return why a node that is not convicted is not healthy either, None if it is."""
    silences, crashes = (len(of.get(node, ())) for of in (findings.silences, findings.crashes))
    if silences >= _OFTEN or (silences and node not in findings.tested):
        return Doubt.SILENT
    if crashes >= _OFTEN or (crashes and node not in findings.passed):
        everywhere = 2 * len(findings.crashes) > findings.sources.nodes
        return Doubt.SOFTWARE if everywhere else Doubt.CRASHED
    trials = findings.trials_of(node)
    if node not in findings.tested:
        # A node that was measured by itself may have had no partners but convicted ones that died:
        # then it is not in doubt because no group of it worked.
        measured = any(node in times for trial in trials for times in trial.node_ms.values())
        only_dead_partners = all(
            any(other in trial.crashed and other in findings.guilty for other in trial.nodes)
            for trial in trials
        )
        return None if measured and only_dead_partners else Doubt.UNMEASURED
    failed = [trial for trial in trials if trial.bearing is Bearing.FAILED]
    if failed:
        # A node that failed more than once with the only partner that it ever worked with is in
        # doubt: the cause is the node, its partner or what is between them.
        together = {trial.nodes for trial in trials if len(trial.nodes) > 1}
        explained = any(other in findings.guilty for t in failed for other in t.partners(node))
        unsteady = len(failed) >= _OFTEN and len(together) == 1 and not explained
        if findings.bad[node] >= _DOUBT or node not in findings.passed or unsteady:
            return Doubt.FAILED
    return None if maybe_slow_in(findings, node) is None else Doubt.SLOW


def maybe_slow_in(findings: Conclusions, node: int) -> MetricEvidence | None:
    """Return the metric in which a node is more likely too slow than not, if there is one."""
    for metric in findings.metrics:
        slowness = metric.slowness
        if slowness.beyond[node] >= _DOUBT and slowness.effect[node] >= np.log1p(metric.floor):
            return metric
    return None


@dataclass(frozen=True, kw_only=True)
class LonePair:
    """A pair that is bad although its nodes are well; `failed` and `slow` are its bad trials."""

    nodes: Pair
    trials: tuple[int, ...]
    failed: tuple[int, ...]
    slow: tuple[int, ...]
    excess: float  # the least log-excess of the slow ones

    @property
    def proven(self) -> bool:
        """Whether the pair was bad in every test, and often enough."""
        needed = _TESTS if self.failed or self.excess > _STRIKING else _TESTS_IF_LITTLE
        return self._always_bad and len(self.trials) >= needed

    @property
    def unproven(self) -> bool:
        """Whether another test of the pair could prove it bad."""
        return self._always_bad and not self.proven

    @property
    def striking(self) -> bool:
        """Whether the only test of the pair was so bad that another round is worth it."""
        return len(self.trials) == 1 and (bool(self.failed) or self.excess > _STRIKING)

    @property
    def level(self) -> Level | None:
        """The level of the connection, None if it has none."""
        if self.proven:
            return Level.FAULTY if self.failed else Level.SLOW
        return Level.INCONCLUSIVE if self.striking else None

    @property
    def _always_bad(self) -> bool:
        return len(self.failed) + len(self.slow) == len(self.trials)


def lone_pairs(findings: Conclusions) -> list[LonePair]:
    """Return the pairs that went badly at least once although all their parts are well."""
    excess: dict[int, float] = {}  # log-excess of trials beyond the floor and beyond the noise
    for metric in findings.metrics:
        if metric.shared:
            limit = max(float(np.log1p(metric.floor)), _BEYOND_NOISE * metric.slowness.noise)
            for row in np.flatnonzero(metric.slowness.excess > limit):
                index = int(metric.trial[row])
                excess[index] = max(excess.get(index, 0.0), float(metric.slowness.excess[row]))
    bad_pairs = set()
    for index, trial in enumerate(findings.trials):
        if index in excess or trial.bearing is Bearing.FAILED:
            row = findings.sources.table[index]
            switches = [int(source) for source in row if source >= findings.sources.nodes]
            nodes_are_well = findings.trusted.issuperset(trial.nodes)
            if nodes_are_well and not findings.guilty.keys() & set(switches):
                bad_pairs.add(trial.nodes)
    history: dict[tuple[int, ...], list[int]] = {}
    for index, trial in enumerate(findings.trials):
        if trial.nodes in bad_pairs and trial.bearing is not Bearing.UNKNOWN:
            history.setdefault(trial.nodes, []).append(index)
    return [
        LonePair(
            nodes=(nodes[0], nodes[1]),
            trials=tuple(trials),
            failed=tuple(i for i in trials if findings.trials[i].bearing is Bearing.FAILED),
            slow=tuple(i for i in trials if i in excess),
            excess=min((excess[i] for i in trials if i in excess), default=0.0),
        )
        for nodes, trials in sorted(history.items())
        if len(nodes) == 2
    ]


def infer_hard(
    trials: Sequence[Trial], sources: Sources, odds: Floats, *, alone: bool = False
) -> Floats:
    """Return the probability of each variable to make its groups fail.

    `sources` holds a row per trial. A crash is a test of the crashed node alone. A pass of a node
    by itself shows nothing about its work with others, unless all nodes are tested `alone`.
    """
    nodes = sources.nodes
    tests = [
        number
        for number, trial in enumerate(trials)
        if trial.bearing is not Bearing.UNKNOWN and len(trial.nodes) >= (1 if alone else 2)
    ]
    crashed = [node for trial in trials for node in trial.crashed]
    crash_rows = np.full((len(crashed), sources.table.shape[1]), NONE, dtype=np.int64)
    crash_rows[:, 0] = crashed
    rows = np.concatenate([sources.table[np.array(tests, dtype=np.int64)], crash_rows])
    if not len(rows):
        logit = odds.copy()
        logit[:nodes] += np.log(0.02)
        return 1 / (1 + np.exp(-logit))
    outcomes = [trials[number].bearing is Bearing.FAILED for number in tests]
    failed = np.array(outcomes + [True] * len(crashed), dtype=np.bool_)
    graph = Graph.of(rows, sources.variables, batch=1, grid=len(_FAILS))
    likelihood = np.log(np.where(failed, _FAILS[:, None], 1 - _FAILS[:, None]))[None]
    share, flaky, messages, bad = 0.02, _FLAKY, None, np.zeros(sources.variables)
    for turn in range(_TURNS):
        logit = odds.copy()
        if turn < _TURNS_WITHOUT_PATHS:  # a bad leaf looks like as many bad paths; it must win
            logit[nodes + sources.leaves :] = _NEVER
        logit[:nodes] += np.log(share / (1 - share))
        log_good, log_bad = -np.logaddexp(0, logit), -np.logaddexp(0, -logit)
        prior = np.stack([log_good, log_bad + np.log(flaky), log_bad + np.log(1 - flaky)])[None]
        beliefs = propagate(graph, likelihood, prior, sweeps=4, messages=messages)
        messages = beliefs.messages
        before, bad = bad, beliefs.states[0, 1:].sum(axis=0)
        if turn > _TURNS_WITHOUT_PATHS and float(np.abs(bad - before).max()) < _SETTLED:
            break
        unsteady = float(beliefs.states[0, 1, :nodes].sum()) + _FLAKY * _FLAKY_PRIOR_NODES
        flaky = unsteady / (float(bad[:nodes].sum()) + _FLAKY_PRIOR_NODES)
        share = min(max((0.05 + float(bad[:nodes].sum())) / (nodes + 1), 1e-6), 0.9)
    return bad
