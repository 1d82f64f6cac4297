# SPDX-License-Identifier: Apache-2.0
"""The sentences of a verdict: for every node and link what was measured, with which partners."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from msgspec.structs import replace

from slurm_health.preflight.localize.conviction import Guilt
from slurm_health.preflight.localize.evidence import Bearing, RoundLedger, Trial
from slurm_health.preflight.localize.findings import (
    Conclusions,
    Doubt,
    LonePair,
    doubt_of,
    lone_pairs,
    maybe_slow_in,
)
from slurm_health.preflight.localize.metrics import MetricEvidence
from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.records.nodeset import fold
from slurm_health.records.text import counted
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict, Outcome, Verdict

_NOTED = 0.9  # a slowdown of the network below the limit is mentioned from this probability on
_NOTED_SHARE = 0.5  # a device's from this share of its limit on: two deviations of its peers
_FEW_PAIRS = 2  # so few may all contain a slow node without any of them standing out
_QUOTED = 2  # different messages of a node: more repeat the same with other numbers
_NAMED = 4  # partners by name; the others are counted
_SAME = 1e-6  # between logarithms of times
_FACTOR = 2.0  # slowdowns from here on are factors, smaller ones per cent
_INCOMPARABLE = 1.0  # devices that differ by more show nothing about each other


def verdict_of(ledger: RoundLedger, findings: Conclusions, settings: LocalizeSettings) -> Verdict:
    """Return the verdict about every node, and about the paths and leaves that are not well."""
    words = _Sentences(ledger, findings, settings)
    return Verdict(
        nodes={name: words.node(number) for number, name in enumerate(ledger.names)},
        paths=tuple(words.paths()),
        leaves=tuple(words.leaves()),
        # The parts of nodes are one population, and share a floor.
        floors={str(replace(metric.name, part="")): metric.floor for metric in findings.metrics},
    )


class _Sentences:
    """Words the conclusions of a run."""

    def __init__(
        self, ledger: RoundLedger, findings: Conclusions, settings: LocalizeSettings
    ) -> None:
        self._names = ledger.names
        self._findings = findings
        self._settings = settings

    def node(self, node: int) -> NodeVerdict:
        """Return the verdict about a node."""
        findings = self._findings
        guilty = findings.guilty.get(node, ())
        level, shown = Level.INCONCLUSIVE, findings.trials_of(node)
        slowdown, probability, component = 1.0, 1.0 - float(findings.risk[node]), "node"
        if guilt := next((proof for proof in guilty if proof.metric is None), None):
            level = Level.FAULTY
            trials = [findings.trials[index] for index in guilt.tests]
            crashed = [trial for trial in trials if node in trial.crashed]
            failed = [trial for trial in trials if node not in trial.crashed]
            reasons = []
            if failed:
                reasons.append(self._failure(node, failed) + self._cause(node, failed))
                component = "network"
            if crashed:
                reasons.append(self._crash(node, crashed))
            reason, probability = "; ".join(reasons), guilt.probability
        elif guilty:
            level = Level.SLOW
            slow_in = [proof.metric for proof in guilty if proof.metric is not None]
            slowdown = max(math.exp(float(m.slowness.effect[node])) for m in slow_in)
            probability = max(proof.probability for proof in guilty)
            reason, component = self._slow(node, guilty)
        elif doubt := doubt_of(findings, node):
            slowdown = max((times for _, times in self._tolerated(node)), default=1.0)
            reason = self._doubt(node, doubt)
            component = "network" if doubt is Doubt.FAILED else "node"
        else:
            level = Level.HEALTHY
            tolerated = self._tolerated(node)
            slowdown = max((times for _, times in tolerated), default=1.0)
            reason = self._notes(node, tolerated)
            shown = [t for t in shown if t.doubts or t.bearing is not Bearing.PASSED]
        return NodeVerdict(
            node=self._names[node],
            level=level,
            slowdown=slowdown,
            probability=probability,
            component=component,
            reason=reason,
            evidence=tuple(self._test(node, trial) for trial in shown),
        )

    def _failure(self, node: int, failed: Sequence[Trial]) -> str:
        partners = self._partners(node, failed)
        return f"no {self._settings.workload} with {partners} ({_ending(failed)})"

    def _cause(self, node: int, failed: Sequence[Trial]) -> str:
        """Return the messages of the node about its failures, or else those of its partners."""
        own = dict.fromkeys(trial.messages[node] for trial in failed if node in trial.messages)
        if own:
            return f": {'; '.join([*own][:_QUOTED])}"
        others = dict.fromkeys(
            f"; {self._names[other]} reported: {text}"
            for trial in failed
            for other, text in sorted(trial.messages.items())
        )
        return "".join([*others][:_QUOTED])

    def _crash(self, node: int, crashes: Sequence[Trial]) -> str:
        """Return the message of the node's own probe when it failed, or that it died."""
        texts = dict.fromkeys(trial.messages[node] for trial in crashes if node in trial.messages)
        late = all(trial.outcome is Outcome.TIMED_OUT for trial in crashes)
        crashed = "did not finish in time" if late else "its check process crashed"
        return f"{'; '.join(texts) or crashed} ({self._rounds(crashes)})"

    def _slow(self, node: int, guilt: Sequence[Guilt]) -> tuple[str, str]:
        """Return in what a node is slow, and the component that is."""
        ordered = sorted(guilt, key=lambda proof: proof.metric is None or proof.metric.shared)
        proofs = [(proof.metric, proof.tests) for proof in ordered if proof.metric is not None]
        reasons = []
        for metric, tests in proofs:
            measured = _against(metric, tests)
            if metric.shared:
                trials = [self._findings.trials[int(metric.trial[row])] for row in tests]
                reasons.append(f"{metric.name} slow with {self._partners(node, trials)} {measured}")
            else:
                times = math.exp(float(metric.slowness.effect[node]))
                reasons.append(f"{metric.name} {_slower(times)} than {_peers(metric)} {measured}")
        own = [metric for metric, _ in proofs if not metric.shared]
        if not own and self._settings.carries_network:
            # A CPU that others use, or that is throttled, moves data as slowly as it computes. Its
            # share varies, so that it takes more tests to prove than its effect on the network.
            causes = [
                f"{metric.name} {_slower(times)} than {_peers(metric)}, which may be why"
                for metric, times in self._tolerated(node)
            ]
            if causes:
                return "; ".join([*reasons, *causes]), "node"
        # A slow device explains a slow network, not the reverse.
        slow_in = own or [metric for metric, _ in proofs]
        component = slow_in[0].name.component
        parts = {metric.name.part for metric in slow_in if metric.name.component == component}
        part = f" {next(iter(parts))}" if len(parts) == 1 and "" not in parts else ""
        return "; ".join(reasons), component + part

    def _doubt(self, node: int, doubt: Doubt) -> str:
        """Return why the run could not decide about a node."""
        findings = self._findings
        match doubt:
            case Doubt.SILENT:
                silent = [findings.trials[index] for index in findings.silences[node]]
                texts = dict.fromkeys(t.messages[node] for t in silent if node in t.messages)
                if texts:
                    return f"could not be measured: {'; '.join(texts)}"
                return f"did not answer in {self._rounds(silent)}"
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
                times = math.exp(float(metric.slowness.effect[node]))
                return (
                    f"{metric.name} may be {_slower(times)} than {_peers(metric)},"
                    " but the measurements vary too much to be sure"
                )
            case Doubt.UNMEASURED:
                return "was never measured"

    def _crashes(self, node: int) -> str:
        crashes = self._findings.crashes[node]
        return self._crash(node, [self._findings.trials[index] for index in crashes])

    def _notes(self, node: int, tolerated: Sequence[tuple[MetricEvidence, float]]) -> str:
        """Return how a healthy node was tested, and what was odd but no reason to accuse it."""
        findings = self._findings
        notes = []
        if node in findings.crashes:
            notes.append(f"{self._crashes(node)}, but worked afterwards")
        for metric in findings.metrics:
            if metric.shared and metric.slowness.slow[node] >= _NOTED:
                times = math.exp(float(metric.slowness.effect[node]))
                limit = f"the limit is {figures(100 * metric.floor)} %"
                notes.append(f"{metric.name} about {_slower(times)}, {limit}")
        # The share of processors that others use differs from test to test, and blames no node.
        for metric, times in [] if self._settings.carries_network else tolerated:
            if metric.floor > _INCOMPARABLE:
                differ = "the devices of this job differ too much to tell"
                notes.append(f"{metric.name} {_slower(times)} than {_peers(metric)}: {differ}")
            else:
                notes.append(
                    f"{metric.name} is {_slower(times)} than {_peers(metric)},"
                    " within what healthy devices differ by"
                )
        trials = [trial for trial in findings.trials_of(node) if not trial.crashed]
        partners = {partner for trial in trials for partner in trial.partners(node)}
        if not partners and not self._settings.alone:
            notes.append("no partner to test the network with")
        if notes:
            return "; ".join(notes)
        if self._settings.alone:
            return "passed its solo tests"
        passed = f"passed with {counted(len(partners), 'partner')}"
        # A pair is as slow as its slower member: a slow node in both of two pairs, or in the only
        # one, leaves no faster pair to show it. More pairs than that, half of them equally slow,
        # are not taken into account.
        if not any(node in pair for pair in self._few_pairs):
            return passed
        if findings.expected_of_pairs:
            return f"{passed}; no slower than what is expected of a pair"
        if len(self._few_pairs) == 1:
            return f"{passed}; not excluded: a slow network, with no other pair to compare"
        return f"{passed}; not excluded: an equally slow node in either pair"

    @cached_property
    def _few_pairs(self) -> frozenset[tuple[int, ...]]:
        """The compared pairs if they are few, else none."""
        shared = [metric for metric in self._findings.metrics if metric.shared]
        trials = self._findings.trials
        pairs = frozenset(trials[int(row)].nodes for metric in shared for row in metric.trial)
        return pairs if len(pairs) <= _FEW_PAIRS else frozenset()

    def _tolerated(self, node: int) -> list[tuple[MetricEvidence, float]]:
        """Return in what a healthy node is slower than most, and by which factor.

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
        """Yield verdicts about the pairs of leaves, or of nodes, whose connection alone is bad."""
        findings = self._findings
        first = findings.sources.nodes + findings.sources.leaves
        for variable in sorted(v for v in findings.guilty if v >= first):
            low, high = findings.sources.paths[variable - first]
            ends = (findings.fabric.leaves[low], findings.fabric.leaves[high])
            yield self._fabric(variable, ends, f"between {ends[0]} and {ends[1]}")
        for pair in lone_pairs(findings):
            if pair.level is not None:
                yield self._lone_pair(pair, pair.level)

    def _lone_pair(self, pair: LonePair, level: Level) -> LinkVerdict:
        tests = len(pair.trials)
        how = "failed" if pair.failed else "was slow"
        times = f"in {tests} of {tests} tests" if pair.proven else "once, and was not tested again"
        workload = self._settings.workload
        return LinkVerdict(
            ends=(self._names[pair.nodes[0]], self._names[pair.nodes[1]]),
            level=level,
            slowdown=math.exp(pair.excess) if pair.slow else 1.0,
            probability=0.99 if pair.proven else 0.5,
            reason=f"{workload} {how} {times}; both nodes are fine with other partners",
            evidence=self._link_tests(pair.trials),
        )

    def leaves(self) -> Iterable[LinkVerdict]:
        """Yield verdicts about the leaves whose uplink is bad; without a name, their nodes."""
        findings, fabric = self._findings, self._findings.fabric
        first, end = findings.sources.nodes, findings.sources.nodes + findings.sources.leaves
        for variable in sorted(v for v in findings.guilty if first <= v < end):
            number = variable - first
            if number < len(fabric.leaves):
                leaf = fabric.leaves[number]
                where = f"across the uplink of {leaf}"
            else:
                members = fabric.unnamed[number - len(fabric.leaves)]
                leaf = fold(self._names[node] for node in members)
                where = f"between {leaf}, which are well with one another, and other nodes"
            yield self._fabric(variable, (leaf,), where)

    def _fabric(self, variable: int, ends: tuple[str, ...], where: str) -> LinkVerdict:
        """Return the verdict about a leaf or a path."""
        findings, guilt = self._findings, self._findings.guilty[variable][0]
        metric, tests = guilt.metric, f"in {len(guilt.tests)} tests"
        if metric is None:
            trials = [findings.trials[index] for index in guilt.tests]
            return LinkVerdict(
                ends=ends,
                level=Level.FAULTY,
                probability=guilt.probability,
                reason=f"no {self._settings.workload} {where} {tests} ({_ending(trials)})",
                evidence=self._link_tests(guilt.tests),
            )
        return LinkVerdict(
            ends=ends,
            level=Level.SLOW,
            slowdown=math.exp(float(metric.slowness.effect[variable])),
            probability=guilt.probability,
            reason=f"{metric.name} slow {where} {tests} {_against(metric, guilt.tests)}",
            evidence=self._link_tests([int(metric.trial[test]) for test in guilt.tests]),
        )

    def _link_tests(self, numbers: Iterable[int]) -> tuple[str, ...]:
        trials = [self._findings.trials[number] for number in numbers]
        return tuple(self._test(t.nodes[0], t, f" {self._names[t.nodes[0]]}") for t in trials)

    def _test(self, node: int, trial: Trial, subject: str = "") -> str:
        """Return the line of a test, from the side of a node."""
        partners = self._partners(node, [trial])
        company = f"with {partners}" if partners else "alone"
        facts = [f"{metric} {ms_text(ms)}" for metric, ms in sorted(trial.shared_ms.items())]
        facts += [
            f"{metric} {ms_text(times[node])}"
            for metric, times in sorted(trial.node_ms.items())
            if node in times
        ]
        if node in trial.silent:
            facts.append(trial.messages.get(node, "did not answer"))
        elif trial.silent:
            facts.append("the partner did not answer")
        if node in trial.crashed:
            facts.append(trial.messages.get(node, "its check process crashed"))
        elif trial.crashed:
            facts.append("the partner's check process crashed")
        elif trial.bearing is Bearing.FAILED:
            facts.insert(0, f"{self._settings.workload} {_ending([trial])}")
            facts += dict.fromkeys(text for _, text in sorted(trial.messages.items()))
        elif trial.outcome is Outcome.NOT_RUN:
            facts.append("not run")
        text = ", ".join([*facts, *trial.doubts]) or "passed"
        if self._settings.alone:
            return f"solo test{subject}: {text}"
        return f"round {trial.round_index}{subject} {company}: {text}"

    def _partners(self, node: int, trials: Sequence[Trial]) -> str:
        """Return the names of the partners of a node in these tests."""
        numbers = dict.fromkeys(other for trial in trials for other in trial.partners(node))
        names = [self._names[number] for number in numbers]
        if len(names) <= _NAMED:
            return ", ".join(names)
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"

    def _rounds(self, trials: Sequence[Trial]) -> str:
        """Return the rounds of these tests by number; solo tests have none."""
        numbers = [str(number) for number in sorted({trial.round_index for trial in trials})]
        if self._settings.alone:
            return "the solo test" if len(numbers) == 1 else f"{len(numbers)} solo tests"
        if len(numbers) == 1:
            return f"round {numbers[0]}"
        return f"rounds {', '.join(numbers[:-1])} and {numbers[-1]}"


def _ending(trials: Sequence[Trial]) -> str:
    """Return how tests that did not end well ended."""
    outcomes = {trial.outcome for trial in trials}
    if outcomes == {Outcome.TIMED_OUT}:
        return "timed out"
    return "failed" if outcomes == {Outcome.FAILED} else "failed or timed out"


def _peers(metric: MetricEvidence) -> str:
    """Return the reference of a device's times: its peers, or the expectation of its model."""
    expected = float(metric.slowness.baseline.min()) >= metric.data.ceiling - _SAME
    return "expected of this model" if expected else "its peers"


def _against(metric: MetricEvidence, tests: Sequence[int]) -> str:
    """Return the median time of these tests and of their baselines, in parentheses."""
    rows = list(tests)
    mine_ms = float(np.exp(np.median(metric.data.log_ms[rows])))
    base_ms = float(np.exp(np.median(metric.slowness.baseline[metric.data.kind[rows]])))
    if math.log(base_ms) >= metric.data.ceiling - _SAME:
        others = "expected at most"
    else:
        others = "healthy pairs" if metric.shared else "peers"
    return f"({ms_text(mine_ms)}, {others} {ms_text(base_ms)})"


def _slower(times: float) -> str:
    if times >= _FACTOR:
        return f"{figures(times)}x slower"
    return f"{figures(100 * (times - 1))} % slower"


def figures(value: float, digits: int = 2) -> str:
    """Return a number with so many significant digits, without an exponent."""
    return f"{float(f'{value:.{digits}g}'):.12g}"


def ms_text(ms: float) -> str:
    """Return a time with three significant digits: a few per cent more may be slow."""
    return f"{figures(ms, 3)} ms" if ms < 1000 else f"{figures(ms / 1000, 3)} s"
