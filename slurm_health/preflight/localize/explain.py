# SPDX-License-Identifier: Apache-2.0
"""Findings in words: every conclusion with what was measured, with whom, against what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from msgspec.structs import replace

from slurm_health.preflight.localize.conviction import Guilt
from slurm_health.preflight.localize.evidence import Bearing, RoundLedger, Trial
from slurm_health.preflight.localize.findings import (
    Conclusions,
    Doubt,
    doubt_of,
    level_of,
    maybe_slow_in,
)
from slurm_health.preflight.localize.metrics import MetricEvidence
from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.preflight.localize.stopping import cheap_to_repeat
from slurm_health.preflight.localize.wording import (
    LinkWords,
    Wording,
    compared_text,
    how_text,
    ms_text,
    others_text,
    times_of,
)
from slurm_health.records.text import counted
from slurm_health.records.verdict import (
    Level,
    NodeVerdict,
    Outcome,
    Verdict,
)

_NOTED = 0.9  # a slowdown of the network below the limit that is this probable is mentioned
_NOTED_SHARE = 0.5  # a device's from this share of its limit on: two deviations of its peers
_FEW_PAIRS = 2  # so few may all contain a slow node without any of them standing out
_TWICE = 2  # rounds
_QUOTED = 2  # different texts of what a node reported: more say the same with other numbers


def verdict_of(ledger: RoundLedger, findings: Conclusions, settings: LocalizeSettings) -> Verdict:
    """Return the verdict about every node, and about the paths and leaves that are not well."""
    words, links = _NodeWords(ledger, findings, settings), LinkWords(ledger, findings, settings)
    nodes = {name: words.node(number) for number, name in enumerate(ledger.names)}
    # The parts of nodes are one population, and share a floor.
    floors = {str(replace(metric.name, part="")): metric.floor for metric in findings.metrics}
    paths, leaves = tuple(links.paths()), tuple(links.leaves())
    return Verdict(nodes=nodes, paths=paths, leaves=leaves, floors=floors)


class _NodeWords(Wording):
    """Finds the words for what is wrong, or not, with a node."""

    def node(self, node: int) -> NodeVerdict:
        """Return the verdict about one node."""
        level = level_of(self.findings, node)
        if level in {Level.FAULTY, Level.SLOW}:
            guilt = self.findings.guilty[node]
            return self._faulty(node, guilt) if level is Level.FAULTY else self._slow(node, guilt)
        reason = self._doubt(node) if level is Level.INCONCLUSIVE else self._notes(node)
        return NodeVerdict(
            node=self.names[node],
            level=level,
            slowdown=max((times for _, times in self._tolerated(node)), default=1.0),
            probability=1.0 - float(self.findings.risk[node]),
            component="network" if doubt_of(self.findings, node) is Doubt.FAILED else "node",
            reason=reason,
            evidence=self._evidence(node),
        )

    def _faulty(self, node: int, found: Sequence[Guilt]) -> NodeVerdict:
        guilt = next(each for each in found if each.metric is None)
        trials = [self.findings.trials[index] for index in guilt.tests]
        crashed = [trial for trial in trials if node in trial.crashed]
        failed = [trial for trial in trials if node not in trial.crashed]
        reasons = []
        if failed:
            reasons.append(self._failure(node, failed) + self._cause(node, failed))
        if crashed:
            reasons.append(self._crash(node, crashed))
        return NodeVerdict(
            node=self.names[node],
            level=Level.FAULTY,
            probability=guilt.probability,
            component="network" if failed else "node",
            reason="; ".join(reasons),
            evidence=self._evidence(node),
        )

    def _failure(self, node: int, failed: Sequence[Trial]) -> str:
        return f"no {self.workload} with {self.partners(node, failed)} ({how_text(failed)})"

    def _cause(self, node: int, failed: Sequence[Trial]) -> str:
        """Say what the node itself reported of its failures, or else what its partners did."""
        own = dict.fromkeys(trial.said[node] for trial in failed if node in trial.said)
        if own:
            return f": {'; '.join([*own][:_QUOTED])}"
        told = dict.fromkeys(
            f"{self.names[other]} said: {text}"
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
            node=self.names[node],
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
        if not self.settings.carries_network:
            return []
        return [
            f"{metric.name} {times:.2f}x slower than {others_text(metric)}, which may be why"
            for metric, times in self._tolerated(node)
        ]

    def _slow_reason(self, node: int, metric: MetricEvidence, tests: Sequence[int]) -> str:
        mine, base = times_of(metric, tests)
        against = f"{ms_text(mine)}, {compared_text(metric, base)} {ms_text(base)}"
        if not metric.shared:
            times = math.exp(float(metric.found.effect[node]))
            return f"{metric.name} {times:.2f}x slower than {others_text(metric)} ({against})"
        trials = [self.findings.trials[int(metric.trial[row])] for row in tests]
        partners = self.partners(node, trials)
        return f"{metric.name} slow with {partners} ({against})"

    def _doubt(self, node: int) -> str:
        """Say why the run could not decide about a node."""
        findings = self.findings
        match doubt_of(findings, node):
            case Doubt.SILENT:
                return self._silence([findings.trials[i] for i in findings.silences[node]], node)
            case Doubt.CRASHED:
                return f"{self._crashes(node)} and has not passed a test since"
            case Doubt.SOFTWARE:
                of = f"{len(findings.crashes)} of {len(self.names)} nodes"
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
                    f"{metric.name} may be {times:.2f}x slower than {others_text(metric)},"
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
        crashes = self.findings.crashes[node]
        return self._crash(node, [self.findings.trials[index] for index in crashes])

    def _notes(self, node: int) -> str:
        """Say how a healthy node was tested, and what was seen that is no reason to accuse it."""
        findings = self.findings
        notes = []
        if node in findings.crashes:
            notes.append(f"{self._crashes(node)}, but worked afterwards")
        for metric in findings.metrics:
            if metric.shared and metric.found.slow[node] >= _NOTED:
                times = math.exp(float(metric.found.effect[node]))
                limit = f"{1 + metric.floor:.2f}x"
                notes.append(f"{metric.name} about {times:.2f}x slower, the limit is {limit}")
        # Who shares processors differs from test to test: that says nothing of a node.
        tolerated = [] if self.settings.carries_network else self._tolerated(node)
        notes += [
            f"{metric.name} is {100 * (times - 1):.0f} % slower than {others_text(metric)},"
            " within what healthy devices differ by"
            for metric, times in tolerated
        ]
        trials = [trial for trial in findings.trials_of(node) if not trial.crashed]
        partners = {p for trial in trials for p in trial.partners(node)}
        if not partners and not self.settings.alone:
            notes.append("no partner to test the network with")
        if notes:
            return "; ".join(notes)
        if self.settings.alone:
            return "passed its solo tests"
        passed = f"passed with {counted(len(partners), 'partner')}"
        return "; ".join([passed, *self._not_excluded(node)])

    def _not_excluded(self, node: int) -> list[str]:
        """Say what so few pairs cannot show, where each of them is as fast as the other.

        A pair is as slow as its slower member: a slow node in both of two pairs, or in the only
        one, leaves nothing to see it by. More pairs than that, half of them equally slow, are not
        taken into account.
        """
        pairs = self._few_pairs
        if self._repeated:
            return ["a second round was cheap: the first took less than 2 s"]
        if not any(node in pair for pair in pairs):
            return []
        if self.findings.expected_of_pairs:
            return ["no slower than what is expected of a pair"]
        if len(pairs) == 1:
            return ["not excluded: a slow network, with no other pair to compare"]
        return ["not excluded: an equally slow node in either pair"]

    @cached_property
    def _few_pairs(self) -> frozenset[tuple[int, ...]]:
        """The pairs that were compared, where there are so few; else none."""
        shared = [metric for metric in self.findings.metrics if metric.shared]
        trials = self.findings.trials
        pairs = frozenset(trials[int(row)].nodes for metric in shared for row in metric.trial)
        return pairs if len(pairs) <= _FEW_PAIRS else frozenset()

    @cached_property
    def _repeated(self) -> bool:
        """Whether a second round was taken only because it cost little."""
        rounds = {trial.round_index for trial in self.findings.trials}
        asked = self.settings.min_rounds > 1 or self.findings.fabric.known
        return not asked and len(rounds) == _TWICE and cheap_to_repeat(self.ledger, self.findings)

    def _tolerated(self, node: int) -> list[tuple[MetricEvidence, float]]:
        """Return in what a healthy node is slower than most, and how many times.

        A job on it waits for such a device, although nothing is wrong with it.
        """
        own = [metric for metric in self.findings.metrics if not metric.shared]
        typical = [(metric, metric.typical_excess(node)) for metric in own]
        return [
            (metric, math.exp(excess))
            for metric, excess in typical
            if excess >= _NOTED_SHARE * np.log1p(metric.floor)
        ]

    def _evidence(self, node: int) -> tuple[str, ...]:
        """Return one line per test of the node."""
        return tuple(self.line(node, trial) for trial in self.findings.trials_of(node))


def _component(metrics: Sequence[MetricEvidence]) -> str:
    """Return the part that is slow; a slow device explains a slow network, not the reverse."""
    own = [metric for metric in metrics if not metric.shared]
    found: dict[str, set[str]] = {}
    for metric in own or metrics:
        found.setdefault(metric.name.component, set()).add(metric.name.part)
    what, parts = next(iter(found.items()))
    return f"{what} {next(iter(parts))}" if len(parts) == 1 and "" not in parts else what
