# SPDX-License-Identifier: Apache-2.0
"""Levels: what is proven, what is in doubt, who can be trusted, and which pairs are bad."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from slurm_health.preflight.localize.belief_propagation import NONE, Floats, Graph, Ints, propagate
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
from slurm_health.preflight.localize.uplinks import Suspicion, with_found_uplinks
from slurm_health.records.verdict import Level

_DOUBT = 0.5  # a node that is bad with at least this probability and not convicted is undecided
_OFTEN = 2  # one silence, crash or failure among tests that work happens to the best
_STRIKING = float(np.log(2.0))  # a single slow test is worth another round from this excess on
_BEYOND_NOISE = 4.0  # deviations
_TESTS, _TESTS_IF_LITTLE = 2, 4  # that prove a pair bad; congestion may strike a few in a row


_FAILS = np.array([0.002, 0.9, 0.999])  # probability to fail when well, flaky, dead
_TURNS, _TURNS_WITHOUT_PATHS = 12, 2  # at most, and of them at first
_SETTLED = 1e-7  # probabilities that change by less change no verdict
_NEVER = -60.0  # log odds
_FLAKY, _FLAKY_PRIOR_NODES = 0.3, 4.0  # share of the bad ones that are flaky, and its weight


class Doubt(Enum):
    """Why a run could not decide about a node."""

    SILENT = "it did not answer"
    CRASHED = "its own check crashed"
    SOFTWARE = "so did those of most nodes"
    UNMEASURED = "no test says anything about it"
    FAILED = "its groups failed, and no trusted node was in any of them"
    SLOW = "it may be slow"


@dataclass(frozen=True, kw_only=True)
class Conclusions:
    """Everything that was concluded from the results so far, by variable number."""

    trials: Sequence[Trial]
    fabric: Fabric
    sources: Sources
    bad: Floats  # probability to make groups fail
    metrics: tuple[MetricEvidence, ...]
    guilty: Mapping[int, tuple[Guilt, ...]]  # nodes, leaves and paths
    crashes: Mapping[int, tuple[int, ...]]  # node -> trials in which its own probe died
    silences: Mapping[int, tuple[int, ...]]
    passed: frozenset[int]  # nodes that were in a group that worked
    tested: frozenset[int]  # nodes about which any trial says anything
    uncontrolled: frozenset[int]  # slow, but for all that is known everybody was at the time
    suspicion: Suspicion  # what slow nodes may have in common
    risk: Floats = field(default_factory=lambda: np.zeros(0))

    @cached_property
    def _took_part(self) -> dict[int, tuple[int, ...]]:
        return _occurrences((index, trial.nodes) for index, trial in enumerate(self.trials))

    def trials_of(self, node: int) -> list[Trial]:
        """Return the trials a node took part in, in order."""
        return [self.trials[index] for index in self._took_part.get(node, ())]

    @property
    def expected_of_pairs(self) -> bool:
        """Tell whether it is known what a pair should reach, in anything that pairs do."""
        return any(metric.shared and np.isfinite(metric.data.ceiling) for metric in self.metrics)

    def trusted(self, node: int) -> bool:
        """Tell whether the node passed a test and is believed to be well in every respect."""
        return node in self.passed and self.risk[node] <= TRUST and node not in self.guilty


def judge(
    trials: Sequence[Trial],
    fabric: Fabric,
    prior: Mapping[int, float],
    settings: LocalizeSettings,
) -> Conclusions:
    """Return what these trials prove and what they leave open."""
    inferred, suspicion = with_found_uplinks(trials, fabric, prior, settings)
    fabric, sources, odds, metrics = inferred
    bad = infer_hard(trials, sources, odds, alone=settings.alone)
    crashes = _occurrences((index, trial.crashed) for index, trial in enumerate(trials))
    guilty = failing(trials, sources, bad, crashes, settings)
    slow_ones, uncontrolled = slow(trials, metrics, sources, guilty, suspicion.held, settings)
    for variable, guilt in slow_ones.items():
        guilty[variable] = (*guilty.get(variable, ()), *guilt)
    risk = bad.copy()
    for metric in metrics:
        risk = np.maximum(risk, metric.found.beyond)
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
        silences=_occurrences((index, trial.silent) for index, trial in enumerate(trials)),
        passed=frozenset(passed),
        tested=frozenset(tested | crashes.keys()),
        uncontrolled=uncontrolled - guilty.keys(),
        suspicion=suspicion,
        risk=risk,
    )


def _occurrences(mentions: Iterable[tuple[int, Sequence[int]]]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for index, nodes in mentions:
        for node in nodes:
            found[node] = (*found.get(node, ()), index)
    return found


def level_of(findings: Conclusions, node: int) -> Level:
    """Return what is concluded about a node."""
    guilt = findings.guilty.get(node, ())
    if guilt:
        return Level.FAULTY if any(each.metric is None for each in guilt) else Level.SLOW
    return Level.HEALTHY if doubt_of(findings, node) is None else Level.INCONCLUSIVE


def doubt_of(findings: Conclusions, node: int) -> Doubt | None:
    """Return why a node that is not convicted is not healthy either, None if it is."""
    silences, crashes = (len(of.get(node, ())) for of in (findings.silences, findings.crashes))
    if silences >= _OFTEN or (silences and node not in findings.tested):
        return Doubt.SILENT
    if crashes >= _OFTEN or (crashes and node not in findings.passed):
        everywhere = 2 * len(findings.crashes) > findings.sources.nodes
        return Doubt.SOFTWARE if everywhere else Doubt.CRASHED
    if node not in findings.tested:
        return None if _only_partners_failed(findings, node) else Doubt.UNMEASURED
    failed = [trial for trial in findings.trials_of(node) if trial.bearing is Bearing.FAILED]
    doubted = findings.bad[node] >= _DOUBT or node not in findings.passed
    if failed and (doubted or _is_unsteady(findings, node, failed)):
        return Doubt.FAILED
    return None if maybe_slow_in(findings, node) is None else Doubt.SLOW


def _only_partners_failed(findings: Conclusions, node: int) -> bool:
    """Tell whether a node was measured by itself, and had no partner but convicted ones that died.

    That it was in no group that worked is then no doubt about it.
    """
    trials = findings.trials_of(node)
    measured = any(node in times for trial in trials for times in trial.node_ms.values())
    return measured and all(
        any(other in trial.crashed and other in findings.guilty for other in trial.partners(node))
        for trial in trials
    )


def maybe_slow_in(findings: Conclusions, node: int) -> MetricEvidence | None:
    """Return the metric in which a node is more likely too slow than not, if there is one."""
    for metric in findings.metrics:
        effect = float(metric.found.effect[node])
        if metric.found.beyond[node] >= _DOUBT and effect >= np.log1p(metric.floor):
            return metric
    return None


def _is_unsteady(findings: Conclusions, node: int, failed: Sequence[Trial]) -> bool:
    """Tell whether the node failed more than once with the only partner it ever worked with.

    Whatever is likelier, the node, its partner or what is between them: nothing shows it.
    """
    together = {trial.nodes for trial in findings.trials_of(node) if len(trial.nodes) > 1}
    explained = any(other in findings.guilty for trial in failed for other in trial.partners(node))
    return len(failed) >= _OFTEN and len(together) == 1 and not explained


@dataclass(frozen=True, kw_only=True)
class LonePair:
    """The tests of one such pair; `failed` and `slow` are the bad ones among `trials`."""

    nodes: Pair
    trials: tuple[int, ...]
    failed: tuple[int, ...]
    slow: tuple[int, ...]
    excess: float  # the least log-excess of the slow ones

    @property
    def proven(self) -> bool:
        """Tell whether the pair was bad whenever it was tested, often enough."""
        needed = _TESTS if self.failed or self.excess > _STRIKING else _TESTS_IF_LITTLE
        return self._always_bad and len(self.trials) >= needed

    @property
    def unproven(self) -> bool:
        """Tell whether another test of the pair could prove it bad."""
        return self._always_bad and not self.proven

    @property
    def striking(self) -> bool:
        """Tell whether the pair was tested once, and so badly that it is worth a round."""
        return len(self.trials) == 1 and (bool(self.failed) or self.excess > _STRIKING)

    @property
    def level(self) -> Level | None:
        """Return what is concluded about the connection, None where nothing is."""
        if self.proven:
            return Level.FAULTY if self.failed else Level.SLOW
        return Level.INCONCLUSIVE if self.striking else None

    @property
    def _always_bad(self) -> bool:
        return len(self.failed) + len(self.slow) == len(self.trials)


def lone_pairs(findings: Conclusions) -> list[LonePair]:
    """Return the pairs that went badly at least once and whose parts are all well."""
    excess = _slow_trials(findings)
    suspects = set(excess) | {
        index for index, trial in enumerate(findings.trials) if trial.bearing is Bearing.FAILED
    }
    bad_pairs = {
        findings.trials[index].nodes for index in suspects if _parts_are_well(findings, index)
    }
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


def _parts_are_well(findings: Conclusions, index: int) -> bool:
    """Tell whether everything that took part in a trial is believed to be well."""
    nodes = findings.trials[index].nodes
    switches = [
        int(source)
        for source in findings.sources.table[index]
        if source != NONE and source >= findings.sources.nodes
    ]
    return all(findings.trusted(node) for node in nodes) and not any(
        switch in findings.guilty for switch in switches
    )


def _slow_trials(findings: Conclusions) -> dict[int, float]:
    """Return the log-excess of trials beyond the floor and beyond the noise."""
    excess: dict[int, float] = {}
    for metric in findings.metrics:
        if metric.shared:
            limit = max(float(np.log1p(metric.floor)), _BEYOND_NOISE * metric.found.noise)
            for row in np.flatnonzero(metric.found.excess > limit):
                index = int(metric.trial[row])
                excess[index] = max(excess.get(index, 0.0), float(metric.found.excess[row]))
    return excess


def infer_hard(
    trials: Sequence[Trial], sources: Sources, odds: Floats, *, alone: bool = False
) -> Floats:
    """Return the probability of each variable to make its groups fail.

    `sources` holds a row per trial. A crash is a test of the crashed node alone. That a node by
    itself passed says nothing about its work with others, unless all are tested `alone`.
    """
    nodes = sources.nodes
    rows, failed = _tests(trials, sources.table, least=1 if alone else 2)
    if not len(rows):
        logit = odds.copy()
        logit[:nodes] += np.log(0.02)
        return 1 / (1 + np.exp(-logit))
    graph = Graph.of(rows, sources.variables)
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


def _tests(
    trials: Sequence[Trial], sources: Ints, *, least: int
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return the sources of each pass, failure and crash, and which of them failed.

    Of groups with fewer than `least` nodes only crashes count.
    """
    tested = [
        number
        for number, trial in enumerate(trials)
        if trial.bearing is not Bearing.UNKNOWN and len(trial.nodes) >= least
    ]
    crashed = [node for trial in trials for node in trial.crashed]
    alone = np.full((len(crashed), sources.shape[1]), NONE, dtype=np.int64)
    alone[:, 0] = crashed
    failed = [trials[number].bearing is Bearing.FAILED for number in tested]
    return (
        np.concatenate([sources[np.array(tested, dtype=np.int64)], alone]),
        np.array(failed + [True] * len(crashed), dtype=np.bool_),
    )
