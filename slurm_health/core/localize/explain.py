# SPDX-License-Identifier: Apache-2.0
"""The verdict in words: every conclusion with what was measured, with whom, against what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypedDict

import numpy as np

from slurm_health.core.localize.conviction import Guilt, Metric
from slurm_health.core.localize.evidence import Bearing, Ledger, Trial
from slurm_health.core.localize.findings import Findings, LonePair, lone_pairs
from slurm_health.core.localize.settings import LocalizeSettings
from slurm_health.core.verdict import (
    Level,
    LinkVerdict,
    NodeVerdict,
    Outcome,
    Verdict,
)

_DOUBT = 0.5  # a node that is bad with at least this probability and not convicted is undecided
_NOTED = 0.9  # a slowdown below the limit that is this probable is mentioned
_OFTEN = 2  # one failure among tests that work happens to the best
_NAMED = 4  # partners that are named before the rest is only counted


def verdict_of(ledger: Ledger, findings: Findings, settings: LocalizeSettings) -> Verdict:
    """Return the verdict about every node, and about the paths and leaves that are not well."""
    words = _Words(ledger, findings, settings)
    nodes = {name: words.node(number) for number, name in enumerate(ledger.names)}
    return Verdict(nodes=nodes, paths=tuple(words.paths()), leaves=tuple(words.leaves()))


class _FabricWords(TypedDict):
    """What a verdict about a leaf and one about a path have in common."""

    level: Level
    slowdown: float
    probability: float
    reason: str
    evidence: tuple[str, ...]


class _Words:
    """Finds the words for one run's findings."""

    def __init__(self, ledger: Ledger, findings: Findings, settings: LocalizeSettings) -> None:
        self._names = ledger.names
        self._workload = settings.workload
        self._findings = findings
        self._settings = settings
        self._history: dict[int, list[int]] = {}
        for index, trial in enumerate(findings.trials):
            for node in trial.nodes:
                self._history.setdefault(node, []).append(index)

    def node(self, node: int) -> NodeVerdict:
        """Return the verdict about one node."""
        guilt = self._findings.guilty.get(node, ())
        failing = next((found for found in guilt if found.metric is None), None)
        if failing is not None:
            return self._faulty(node, failing)
        if guilt:
            return self._slow(node, guilt)
        return self._undecided(node) or self._healthy(node)

    def _faulty(self, node: int, guilt: Guilt) -> NodeVerdict:
        trials = [self._findings.trials[index] for index in guilt.tests]
        crashed = [trial for trial in trials if node in trial.crashed]
        failed = [trial for trial in trials if node not in trial.crashed]
        reasons = []
        if failed:
            partners = self._partners(node, failed)
            reasons.append(f"no {self._workload} with {partners} ({_how(failed)})")
        if crashed:
            reasons.append(self._crash(node, crashed))
        return NodeVerdict(
            node=self._names[node],
            level=Level.FAULTY,
            probability=guilt.probability,
            component="network" if failed else "node",
            reason="; ".join(reasons),
            evidence=self._evidence(node),
        )

    def _crash(self, node: int, crashes: Sequence[Trial]) -> str:
        """Say what the node's own probe reported when it failed, or that it died."""
        texts = dict.fromkeys(trial.said[node] for trial in crashes if node in trial.said)
        late = all(trial.outcome is Outcome.TIMED_OUT for trial in crashes)
        crashed = "did not finish in time" if late else "its check process crashed"
        what = "; ".join(texts) or crashed
        return f"{what} ({self._rounds_of(crashes)})"

    def _rounds_of(self, trials: Sequence[Trial]) -> str:
        numbers = [str(number) for number in sorted({trial.round_index for trial in trials})]
        if len(numbers) == 1:
            return f"round {numbers[0]}"
        return f"rounds {', '.join(numbers[:-1])} and {numbers[-1]}"

    def _slow(self, node: int, guilt: Sequence[Guilt]) -> NodeVerdict:
        ordered = sorted(guilt, key=lambda found: found.metric is None or found.metric.shared)
        metrics = [found.metric for found in ordered if found.metric is not None]
        slowdown = max(math.exp(float(metric.found.effect[node])) for metric in metrics)
        reasons = [
            self._slow_reason(node, found.metric, found.tests)
            for found in ordered
            if found.metric is not None
        ]
        return NodeVerdict(
            node=self._names[node],
            level=Level.SLOW,
            slowdown=slowdown,
            probability=max(found.probability for found in guilt),
            component=_component(metrics),
            reason="; ".join(reasons),
            evidence=self._evidence(node),
        )

    def _slow_reason(self, node: int, metric: Metric, tests: Sequence[int]) -> str:
        mine, base = _times(metric, tests)
        if not metric.shared:
            times = math.exp(float(metric.found.effect[node]))
            return (
                f"{metric.name} {times:.2f}x slower than its peers ({_ms(mine)}, peers {_ms(base)})"
            )
        trials = [self._findings.trials[int(metric.trial[row])] for row in tests]
        partners = self._partners(node, trials)
        return f"{metric.name} slow with {partners} ({_ms(mine)}, healthy pairs {_ms(base)})"

    def _undecided(self, node: int) -> NodeVerdict | None:
        """Return the verdict about a node on which the run could not decide, if it is one."""
        reason = self._doubt(node)
        if reason is None:
            return None
        return NodeVerdict(
            node=self._names[node],
            level=Level.INCONCLUSIVE,
            probability=1.0 - float(self._findings.risk[node]),
            reason=reason,
            evidence=self._evidence(node),
        )

    def _doubt(self, node: int) -> str | None:
        findings = self._findings
        silences = findings.silences.get(node, ())
        crashes = [findings.trials[index] for index in findings.crashes.get(node, ())]
        if len(silences) >= 2 or (silences and node not in findings.tested):
            silent = [findings.trials[index] for index in silences]
            why = dict.fromkeys(trial.said[node] for trial in silent if node in trial.said)
            if why:
                return f"could not be measured: {'; '.join(why)}"
            return f"never answered in {self._rounds_of(silent)}"
        if crashes and (len(crashes) >= 2 or node not in findings.passed):
            return self._crash_doubt(node, crashes)
        if node not in findings.tested:
            return "was never measured"
        failed = [t for t in self._trials(node) if t.bearing is Bearing.FAILED]
        doubted = findings.bad[node] >= _DOUBT or node not in findings.passed
        if failed and (doubted or self._is_unsteady(node, failed)):
            partners = self._partners(node, failed)
            return (
                f"no {self._workload} with {partners} ({_how(failed)}),"
                " and too few proven partners to tell who is to blame"
            )
        for metric in findings.metrics:
            limit = math.log1p(metric.floor)
            if metric.found.beyond[node] >= _DOUBT and metric.found.effect[node] >= limit:
                times = math.exp(float(metric.found.effect[node]))
                return (
                    f"{metric.name} may be {times:.2f}x slower than its peers,"
                    " too uncertain to tell"
                )
        return None

    def _is_unsteady(self, node: int, failed: Sequence[Trial]) -> bool:
        """Tell whether the node failed more than once with the only partner it ever worked with.

        Whatever is likelier, the node, its partner or what is between them: nothing shows it.
        """
        together = {trial.nodes for trial in self._trials(node) if len(trial.nodes) > 1}
        to_blame = any(
            other in self._findings.guilty for trial in failed for other in trial.partners(node)
        )
        return len(failed) >= _OFTEN and len(together) == 1 and not to_blame

    def _crash_doubt(self, node: int, crashes: Sequence[Trial]) -> str:
        text = self._crash(node, crashes)
        count = len(self._findings.crashes)
        if 2 * count > len(self._names):
            return f"{text}, as on {count} of {len(self._names)} nodes: more likely the software"
        return f"{text} and was not seen to work since"

    def _healthy(self, node: int) -> NodeVerdict:
        findings = self._findings
        notes = []
        crashes = [findings.trials[index] for index in findings.crashes.get(node, ())]
        if crashes:
            notes.append(f"{self._crash(node, crashes)}, and worked afterwards")
        for metric in findings.metrics:
            if metric.found.slow[node] >= _NOTED:
                times = math.exp(float(metric.found.effect[node]))
                limit = f"{1 + metric.floor:.2f}x"
                notes.append(f"{metric.name} about {times:.2f}x slower, the limit is {limit}")
        if self._settings.alone:
            notes = notes or ["well by itself"]
        elif not any(len(trial.nodes) > 1 for trial in self._trials(node)):
            notes.append("no partner to test the network with")
        if not notes:
            partners = {p for trial in self._trials(node) for p in trial.partners(node)}
            count = len(partners)
            notes.append(f"well with {count} partner{'s' if count != 1 else ''}")
        return NodeVerdict(
            node=self._names[node],
            level=Level.HEALTHY,
            probability=1.0 - float(findings.risk[node]),
            component="node",
            reason="; ".join(notes),
            evidence=self._evidence(node),
        )

    def paths(self) -> Iterable[LinkVerdict]:
        """Return the pairs of leaves, or of nodes, whose connection alone is bad."""
        findings = self._findings
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
        if not pair.proven and not pair.striking:
            return None
        tests = len(pair.trials)
        how = "failed" if pair.failed else "was slow"
        times = f"in {tests} of {tests} tests" if pair.proven else "once, and was not tested again"
        level = Level.FAULTY if pair.failed else Level.SLOW
        return LinkVerdict(
            ends=(self._names[pair.nodes[0]], self._names[pair.nodes[1]]),
            level=level if pair.proven else Level.INCONCLUSIVE,
            slowdown=math.exp(pair.excess) if pair.slow else 1.0,
            probability=0.99 if pair.proven else 0.5,
            reason=f"{self._workload} {how} {times}; both ends are well with others",
            evidence=tuple(self._fabric_line(index) for index in pair.trials),
        )

    def leaves(self) -> Iterable[LinkVerdict]:
        """Return the leaves whose uplink is bad."""
        findings = self._findings
        first, end = findings.sources.nodes, findings.sources.nodes + findings.sources.leaves
        for variable in sorted(v for v in findings.guilty if first <= v < end):
            leaf = findings.fabric.leaves[variable - first]
            found = self._fabric_guilt(variable, f"across the uplink of {leaf}")
            yield LinkVerdict(ends=(leaf,), **found)

    def _fabric_guilt(self, variable: int, where: str) -> _FabricWords:
        guilt = self._findings.guilty[variable][0]
        metric = guilt.metric
        if metric is None:
            trials = [self._findings.trials[index] for index in guilt.tests]
            reason = f"no {self._workload} {where} in {len(trials)} tests ({_how(trials)})"
            numbers = guilt.tests
        else:
            mine, base = _times(metric, guilt.tests)
            reason = (
                f"{metric.name} slow {where} in {len(guilt.tests)} tests"
                f" ({_ms(mine)}, healthy pairs {_ms(base)})"
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
        trial = self._findings.trials[index]
        return self._line(trial.nodes[0], trial, also=self._names[trial.nodes[0]])

    def _trials(self, node: int) -> list[Trial]:
        return [self._findings.trials[index] for index in self._history.get(node, ())]

    def _partners(self, node: int, trials: Sequence[Trial]) -> str:
        numbers = dict.fromkeys(other for trial in trials for other in trial.partners(node))
        names = [self._names[number] for number in numbers]
        if len(names) <= _NAMED:
            return ", ".join(names)
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"

    def _evidence(self, node: int) -> tuple[str, ...]:
        """Return one line per test of the node."""
        return tuple(self._line(node, trial) for trial in self._trials(node))

    def _line(self, node: int, trial: Trial, also: str = "") -> str:
        partners = self._partners(node, [trial])
        who = f" {also}" if also else ""
        company = f"with {partners}" if partners else "alone"
        where = f"round {trial.round_index}{who} {company}"
        facts = [f"{metric} {_ms(ms)}" for metric, ms in sorted(trial.shared_ms.items())]
        facts += [
            f"{metric} {_ms(times[node])}"
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
            facts.insert(0, f"{self._workload} {_how([trial])}")
        elif trial.outcome is Outcome.NOT_RUN:
            facts.append("not run")
        return f"{where}: {', '.join([*facts, *trial.doubts]) or 'passed'}"


def _times(metric: Metric, tests: Sequence[int]) -> tuple[float, float]:
    """Return the median time of these tests, and of their baselines."""
    rows = list(tests)
    mine = float(np.exp(np.median(metric.data.log_ms[rows])))
    return mine, float(np.exp(np.median(metric.found.baseline[metric.data.kind[rows]])))


def _component(metrics: Sequence[Metric]) -> str:
    """Return the part that is slow; a slow device explains a slow network, not the reverse."""
    own = [metric for metric in metrics if not metric.shared]
    found: dict[str, set[str]] = {}
    for metric in own or metrics:
        found.setdefault(metric.name.component, set()).add(metric.name.part)
    what, parts = next(iter(found.items()))
    return f"{what} {next(iter(parts))}" if len(parts) == 1 and "" not in parts else what


def _how(trials: Sequence[Trial]) -> str:
    outcomes = {trial.outcome for trial in trials}
    if outcomes == {Outcome.TIMED_OUT}:
        return "timed out"
    return "failed" if outcomes == {Outcome.FAILED} else "failed or timed out"


def _ms(ms: float) -> str:
    """Return a time with three significant digits."""
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1000:.3g} s"
