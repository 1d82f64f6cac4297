# SPDX-License-Identifier: Apache-2.0
"""Findings in words: every conclusion with what was measured, with whom, against what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypedDict

import numpy as np
from msgspec.structs import replace

from slurm_health.preflight.localize.conviction import Guilt
from slurm_health.preflight.localize.evidence import Bearing, Ledger, Trial
from slurm_health.preflight.localize.findings import (
    Doubt,
    Findings,
    LonePair,
    doubt_of,
    level_of,
    lone_pairs,
    maybe_slow_in,
)
from slurm_health.preflight.localize.metrics import MetricEvidence
from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.records.nodeset import fold
from slurm_health.records.verdict import (
    Level,
    LinkVerdict,
    NodeVerdict,
    Outcome,
    Verdict,
)

_NOTED = 0.9  # a slowdown of the network below the limit that is this probable is mentioned
_NOTED_SHARE = 0.5  # a device's from this share of its limit on: two deviations of its peers
_FEW_PAIRS = 2  # so few may all contain a slow node without any of them standing out
_NAMED = 4  # partners that are named before the rest is only counted
_QUOTED = 2  # different texts of what a node reported: more say the same with other numbers
_SAME = 1e-6  # between logarithms of times


def verdict_of(ledger: Ledger, findings: Findings, settings: LocalizeSettings) -> Verdict:
    """Return the verdict about every node, and about the paths and leaves that are not well."""
    words = _Words(ledger, findings, settings)
    nodes = {name: words.node(number) for number, name in enumerate(ledger.names)}
    # The parts of nodes are one population, and share a floor.
    floors = {str(replace(metric.name, part="")): metric.floor for metric in findings.metrics}
    paths, leaves = tuple(words.paths()), tuple(words.leaves())
    return Verdict(nodes=nodes, paths=paths, leaves=leaves, floors=floors)


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

    def node(self, node: int) -> NodeVerdict:
        """Return the verdict about one node."""
        level = level_of(self._findings, node)
        if level in {Level.FAULTY, Level.SLOW}:
            guilt = self._findings.guilty[node]
            return self._faulty(node, guilt) if level is Level.FAULTY else self._slow(node, guilt)
        reason = self._doubt(node) if level is Level.INCONCLUSIVE else self._notes(node)
        return NodeVerdict(
            node=self._names[node],
            level=level,
            slowdown=max((times for _, times in self._tolerated(node)), default=1.0),
            probability=1.0 - float(self._findings.risk[node]),
            reason=reason,
            evidence=self._evidence(node),
        )

    def _faulty(self, node: int, found: Sequence[Guilt]) -> NodeVerdict:
        guilt = next(each for each in found if each.metric is None)
        trials = [self._findings.trials[index] for index in guilt.tests]
        crashed = [trial for trial in trials if node in trial.crashed]
        failed = [trial for trial in trials if node not in trial.crashed]
        reasons = []
        if failed:
            reasons.append(self._failure(node, failed) + self._cause(node, failed))
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

    def _failure(self, node: int, failed: Sequence[Trial]) -> str:
        return f"no {self._workload} with {self._partners(node, failed)} ({_how(failed)})"

    def _cause(self, node: int, failed: Sequence[Trial]) -> str:
        """Say what the node itself reported of its failures, or else what its partners did."""
        own = dict.fromkeys(trial.said[node] for trial in failed if node in trial.said)
        if own:
            return f": {'; '.join([*own][:_QUOTED])}"
        told = dict.fromkeys(
            f"{self._names[other]} said: {text}"
            for trial in failed
            for other, text in sorted(trial.said.items())
        )
        return "".join(f"; {text}" for text in [*told][:_QUOTED])

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
        common = self._common_causes(node) if all(metric.shared for metric in metrics) else []
        return NodeVerdict(
            node=self._names[node],
            level=Level.SLOW,
            slowdown=slowdown,
            probability=max(found.probability for found in guilt),
            component="node" if common else _component(metrics),
            reason="; ".join([*reasons, *common]),
            evidence=self._evidence(node),
        )

    def _common_causes(self, node: int) -> list[str]:
        """Say in what a node with a slow network is slower too, where that may explain it.

        A CPU that others use, or that is throttled, moves data as slowly as it computes. Its share
        varies, so that it takes more tests to prove it slow than to see its network suffer.
        """
        if not self._settings.carries_network:
            return []
        return [
            f"{metric.name} {times:.2f}x slower than {_others(metric)}, which may be why"
            for metric, times in self._tolerated(node)
        ]

    def _slow_reason(self, node: int, metric: MetricEvidence, tests: Sequence[int]) -> str:
        mine, base = _times(metric, tests)
        against = f"{_ms(mine)}, {_compared(metric, base)} {_ms(base)}"
        if not metric.shared:
            times = math.exp(float(metric.found.effect[node]))
            return f"{metric.name} {times:.2f}x slower than {_others(metric)} ({against})"
        trials = [self._findings.trials[int(metric.trial[row])] for row in tests]
        partners = self._partners(node, trials)
        return f"{metric.name} slow with {partners} ({against})"

    def _doubt(self, node: int) -> str:
        """Say why the run could not decide about a node."""
        findings = self._findings
        match doubt_of(findings, node):
            case Doubt.SILENT:
                return self._silence([findings.trials[i] for i in findings.silences[node]], node)
            case Doubt.CRASHED:
                return f"{self._crashes(node)} and has not passed a test since"
            case Doubt.SOFTWARE:
                of = f"{len(findings.crashes)} of {len(self._names)} nodes"
                return f"{self._crashes(node)}, as on {of}: probably a software problem"
            case Doubt.FAILED:
                trials = findings.trials_of(node)
                failed = [trial for trial in trials if trial.bearing is Bearing.FAILED]
                return (
                    f"{self._failure(node, failed)},"
                    " and not enough known-good partners to identify the faulty node"
                    f"{self._cause(node, failed)}"
                )
            case Doubt.SLOW:
                metric = maybe_slow_in(findings, node)
                assert metric is not None
                times = math.exp(float(metric.found.effect[node]))
                return (
                    f"{metric.name} may be {times:.2f}x slower than {_others(metric)},"
                    " but the measurements vary too much to be sure"
                )
            case _:
                return "was never measured"

    def _silence(self, silent: Sequence[Trial], node: int) -> str:
        said = dict.fromkeys(trial.said[node] for trial in silent if node in trial.said)
        if said:
            return f"could not be measured: {'; '.join(said)}"
        return f"did not answer in {self._rounds_of(silent)}"

    def _crashes(self, node: int) -> str:
        crashes = self._findings.crashes[node]
        return self._crash(node, [self._findings.trials[index] for index in crashes])

    def _notes(self, node: int) -> str:
        """Say how a healthy node was tested, and what was seen that is no reason to accuse it."""
        findings = self._findings
        notes = []
        if node in findings.crashes:
            notes.append(f"{self._crashes(node)}, but worked afterwards")
        for metric in findings.metrics:
            if metric.shared and metric.found.slow[node] >= _NOTED:
                times = math.exp(float(metric.found.effect[node]))
                limit = f"{1 + metric.floor:.2f}x"
                notes.append(f"{metric.name} about {times:.2f}x slower, the limit is {limit}")
        # Who shares processors differs from test to test: that says nothing of a node.
        tolerated = [] if self._settings.carries_network else self._tolerated(node)
        notes += [
            f"{metric.name} is {100 * (times - 1):.0f} % slower than {_others(metric)},"
            " within what healthy devices differ by"
            for metric, times in tolerated
        ]
        trials = [trial for trial in findings.trials_of(node) if not trial.crashed]
        partners = {p for trial in trials for p in trial.partners(node)}
        if not partners and not self._settings.alone:
            notes.append("no partner to test the network with")
        if notes:
            return "; ".join(notes)
        if self._settings.alone:
            return "passed its solo tests"
        passed = f"passed with {len(partners)} partner{'s' if len(partners) != 1 else ''}"
        return "; ".join([passed, *self._not_excluded(node)])

    def _not_excluded(self, node: int) -> list[str]:
        """Say what so few pairs cannot show, where each of them is as fast as the other.

        A pair is as slow as its slower member: a slow node in both of two pairs, or in the only
        one, leaves nothing to see it by. More pairs than that, half of them equally slow, are not
        taken into account.
        """
        pairs = self._few_pairs
        if not any(node in pair for pair in pairs):
            return []
        if len(pairs) == 1:
            return ["not excluded: a slow network, with no other pair to compare"]
        return ["not excluded: an equally slow node in either pair"]

    @cached_property
    def _few_pairs(self) -> frozenset[tuple[int, ...]]:
        """The pairs that were compared with each other alone; none where there is more to go by."""
        shared = [metric for metric in self._findings.metrics if metric.shared]
        if any(np.isfinite(metric.data.ceiling) for metric in shared):
            return frozenset()
        trials = self._findings.trials
        pairs = frozenset(trials[int(row)].nodes for metric in shared for row in metric.trial)
        return pairs if len(pairs) <= _FEW_PAIRS else frozenset()

    def _tolerated(self, node: int) -> list[tuple[MetricEvidence, float]]:
        """Return in what a healthy node is slower than most, and how many times.

        A job on it waits for such a device, although nothing is wrong with it.
        """
        own = [metric for metric in self._findings.metrics if not metric.shared]
        typical = [(metric, metric.typical_excess(node)) for metric in own]
        return [
            (metric, math.exp(excess))
            for metric, excess in typical
            if excess >= _NOTED_SHARE * np.log1p(metric.floor)
        ]

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
        if pair.level is None:
            return None
        tests = len(pair.trials)
        how = "failed" if pair.failed else "was slow"
        times = f"in {tests} of {tests} tests" if pair.proven else "once, and was not tested again"
        return LinkVerdict(
            ends=(self._names[pair.nodes[0]], self._names[pair.nodes[1]]),
            level=pair.level,
            slowdown=math.exp(pair.excess) if pair.slow else 1.0,
            probability=0.99 if pair.proven else 0.5,
            reason=f"{self._workload} {how} {times}; both nodes are fine with other partners",
            evidence=tuple(self._fabric_line(index) for index in pair.trials),
        )

    def leaves(self) -> Iterable[LinkVerdict]:
        """Return the leaves whose uplink is bad."""
        findings = self._findings
        first, end = findings.sources.nodes, findings.sources.nodes + findings.sources.leaves
        for variable in sorted(v for v in findings.guilty if first <= v < end):
            name, where = self._leaf(variable - first)
            yield LinkVerdict(ends=(name,), **self._fabric_guilt(variable, where))

    def _leaf(self, number: int) -> tuple[str, str]:
        """Return a leaf's name, its nodes where no topology names it, and what its uplink joins."""
        fabric = self._findings.fabric
        if number < len(fabric.leaves):
            leaf = fabric.leaves[number]
            return leaf, f"across the uplink of {leaf}"
        members = fabric.found[number - len(fabric.leaves)]
        nodes = fold(self._names[node] for node in members)
        return nodes, f"between {nodes}, which are well with one another, and other nodes"

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
                f" ({_ms(mine)}, {_compared(metric, base)} {_ms(base)})"
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

    def _partners(self, node: int, trials: Sequence[Trial]) -> str:
        numbers = dict.fromkeys(other for trial in trials for other in trial.partners(node))
        names = [self._names[number] for number in numbers]
        if len(names) <= _NAMED:
            return ", ".join(names)
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"

    def _evidence(self, node: int) -> tuple[str, ...]:
        """Return one line per test of the node."""
        return tuple(self._line(node, trial) for trial in self._findings.trials_of(node))

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
            facts += dict.fromkeys(text for _, text in sorted(trial.said.items()))
        elif trial.outcome is Outcome.NOT_RUN:
            facts.append("not run")
        return f"{where}: {', '.join([*facts, *trial.doubts]) or 'passed'}"


def _times(metric: MetricEvidence, tests: Sequence[int]) -> tuple[float, float]:
    """Return the median time of these tests, and of their baselines."""
    rows = list(tests)
    mine = float(np.exp(np.median(metric.data.log_ms[rows])))
    return mine, float(np.exp(np.median(metric.found.baseline[metric.data.kind[rows]])))


def _others(metric: MetricEvidence) -> str:
    """Say with what the times of devices were compared: each other, or what is known of them."""
    ceiling = metric.data.ceiling
    expected = float(metric.found.baseline.min()) >= ceiling - _SAME
    return "expected of this model" if expected else "its peers"


def _compared(metric: MetricEvidence, base_ms: float) -> str:
    """Name what a time is held against: other measurements, or the limit of what is expected."""
    if math.log(base_ms) >= metric.data.ceiling - _SAME:
        return "expected at most"
    return "healthy pairs" if metric.shared else "peers"


def _component(metrics: Sequence[MetricEvidence]) -> str:
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
