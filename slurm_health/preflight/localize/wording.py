# SPDX-License-Identifier: Apache-2.0
"""What verdicts about nodes and about links are worded with: a line per test, times, partners.

Findings about links in words: paths between leaves or two nodes, and the uplinks of leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypedDict

import numpy as np

from slurm_health.preflight.localize.evidence import Bearing, RoundLedger, Trial
from slurm_health.preflight.localize.findings import Conclusions, LonePair, lone_pairs
from slurm_health.preflight.localize.metrics import MetricEvidence
from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.records.nodeset import fold
from slurm_health.records.verdict import Level, LinkVerdict, Outcome

_NAMED = 4  # partners that are named before the rest is only counted
_SAME = 1e-6  # between logarithms of times


class Wording:
    """Finds the words for one run's findings."""

    def __init__(
        self, ledger: RoundLedger, findings: Conclusions, settings: LocalizeSettings
    ) -> None:
        self.ledger = ledger
        self.names = ledger.names
        self.workload = settings.workload
        self.findings = findings
        self.settings = settings

    def partners(self, node: int, trials: Sequence[Trial]) -> str:
        """Name with whom a node was in these tests."""
        numbers = dict.fromkeys(other for trial in trials for other in trial.partners(node))
        names = [self.names[number] for number in numbers]
        if len(names) <= _NAMED:
            return ", ".join(names)
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"

    def line(self, node: int, trial: Trial, also: str = "") -> str:
        """Return what one test says of a node, in a line."""
        partners = self.partners(node, [trial])
        who = f" {also}" if also else ""
        company = f"with {partners}" if partners else "alone"
        where = f"round {trial.round_index}{who} {company}"
        facts = [f"{metric} {ms_text(ms)}" for metric, ms in sorted(trial.shared_ms.items())]
        facts += [
            f"{metric} {ms_text(times[node])}"
            for metric, times in sorted(trial.node_ms.items())
            if node in times
        ]
        if node in trial.silent:
            facts.append(trial.said.get(node, "did not answer"))
        elif trial.silent:
            facts.append("the partner did not answer")
        if node in trial.crashed:
            facts.append(trial.said.get(node, "its check process crashed"))
        elif trial.crashed:
            facts.append("the partner's check process crashed")
        elif trial.bearing is Bearing.FAILED:
            facts.insert(0, f"{self.workload} {how_text([trial])}")
            facts += dict.fromkeys(text for _, text in sorted(trial.said.items()))
        elif trial.outcome is Outcome.NOT_RUN:
            facts.append("not run")
        return f"{where}: {', '.join([*facts, *trial.doubts]) or 'passed'}"


def times_of(metric: MetricEvidence, tests: Sequence[int]) -> tuple[float, float]:
    """Return the median time of these tests, and of their baselines."""
    rows = list(tests)
    mine = float(np.exp(np.median(metric.data.log_ms[rows])))
    return mine, float(np.exp(np.median(metric.found.baseline[metric.data.kind[rows]])))


def others_text(metric: MetricEvidence) -> str:
    """Say with what the times of devices were compared: each other, or what is known of them."""
    ceiling = metric.data.ceiling
    expected = float(metric.found.baseline.min()) >= ceiling - _SAME
    return "expected of this model" if expected else "its peers"


def compared_text(metric: MetricEvidence, base_ms: float) -> str:
    """Name what a time is held against: other measurements, or the limit of what is expected."""
    if math.log(base_ms) >= metric.data.ceiling - _SAME:
        return "expected at most"
    return "healthy pairs" if metric.shared else "peers"


def how_text(trials: Sequence[Trial]) -> str:
    """Say how tests ended that did not end well."""
    outcomes = {trial.outcome for trial in trials}
    if outcomes == {Outcome.TIMED_OUT}:
        return "timed out"
    return "failed" if outcomes == {Outcome.FAILED} else "failed or timed out"


def ms_text(ms: float) -> str:
    """Return a time with three significant digits."""
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1000:.3g} s"


class _FabricWords(TypedDict):
    """What a verdict about a leaf and one about a path have in common."""

    level: Level
    slowdown: float
    probability: float
    reason: str
    evidence: tuple[str, ...]


class LinkWords(Wording):
    """Finds the words for what is wrong between nodes."""

    def paths(self) -> Iterable[LinkVerdict]:
        """Return the pairs of leaves, or of nodes, whose connection alone is bad."""
        findings = self.findings
        first = findings.sources.nodes + findings.sources.leaves
        for variable in sorted(v for v in findings.guilty if v >= first):
            low, high = findings.sources.paths[variable - first]
            ends = (findings.fabric.leaves[low], findings.fabric.leaves[high])
            found = self._fabric_guilt(variable, f"between {ends[0]} and {ends[1]}")
            yield LinkVerdict(ends=ends, **found)
        for pair in lone_pairs(findings):
            verdict = self._pair(pair)
            if verdict is not None:
                yield verdict

    def _pair(self, pair: LonePair) -> LinkVerdict | None:
        """Return the verdict about two nodes that are well with everybody but each other."""
        if pair.level is None:
            return None
        tests = len(pair.trials)
        how = "failed" if pair.failed else "was slow"
        times = f"in {tests} of {tests} tests" if pair.proven else "once, and was not tested again"
        return LinkVerdict(
            ends=(self.names[pair.nodes[0]], self.names[pair.nodes[1]]),
            level=pair.level,
            slowdown=math.exp(pair.excess) if pair.slow else 1.0,
            probability=0.99 if pair.proven else 0.5,
            reason=f"{self.workload} {how} {times}; both nodes are fine with other partners",
            evidence=tuple(self._fabric_line(index) for index in pair.trials),
        )

    def leaves(self) -> Iterable[LinkVerdict]:
        """Return the leaves whose uplink is bad."""
        findings = self.findings
        first, end = findings.sources.nodes, findings.sources.nodes + findings.sources.leaves
        for variable in sorted(v for v in findings.guilty if first <= v < end):
            name, where = self._leaf(variable - first)
            yield LinkVerdict(ends=(name,), **self._fabric_guilt(variable, where))

    def _leaf(self, number: int) -> tuple[str, str]:
        """Return a leaf's name, its nodes where no topology names it, and what its uplink joins."""
        fabric = self.findings.fabric
        if number < len(fabric.leaves):
            leaf = fabric.leaves[number]
            return leaf, f"across the uplink of {leaf}"
        members = fabric.found[number - len(fabric.leaves)]
        nodes = fold(self.names[node] for node in members)
        return nodes, f"between {nodes}, which are well with one another, and other nodes"

    def _fabric_guilt(self, variable: int, where: str) -> _FabricWords:
        guilt = self.findings.guilty[variable][0]
        metric = guilt.metric
        if metric is None:
            trials = [self.findings.trials[index] for index in guilt.tests]
            reason = f"no {self.workload} {where} in {len(trials)} tests ({how_text(trials)})"
            numbers = guilt.tests
        else:
            mine, base = times_of(metric, guilt.tests)
            reason = (
                f"{metric.name} slow {where} in {len(guilt.tests)} tests"
                f" ({ms_text(mine)}, {compared_text(metric, base)} {ms_text(base)})"
            )
            numbers = tuple(int(metric.trial[test]) for test in guilt.tests)
        return _FabricWords(
            level=Level.FAULTY if metric is None else Level.SLOW,
            slowdown=1.0 if metric is None else math.exp(float(metric.found.effect[variable])),
            probability=guilt.probability,
            reason=reason,
            evidence=tuple(self._fabric_line(index) for index in numbers),
        )

    def _fabric_line(self, index: int) -> str:
        trial = self.findings.trials[index]
        return self.line(trial.nodes[0], trial, also=self.names[trial.nodes[0]])
