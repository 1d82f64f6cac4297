# SPDX-License-Identifier: Apache-2.0
"""What verdicts about nodes and about links are worded with: a line per test, times, partners."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from slurm_health.preflight.localize.evidence import Bearing, Ledger, Trial
from slurm_health.preflight.localize.findings import Findings
from slurm_health.preflight.localize.metrics import MetricEvidence
from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.records.verdict import Outcome

_NAMED = 4  # partners that are named before the rest is only counted
_SAME = 1e-6  # between logarithms of times


class Wording:
    """Finds the words for one run's findings."""

    def __init__(self, ledger: Ledger, findings: Findings, settings: LocalizeSettings) -> None:
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
