# SPDX-License-Identifier: Apache-2.0
"""Find the bad nodes, links and leaves of a run by testing pairs of nodes, round after round.

The Localizer plans each round from the evidence so far and concludes in the end what is proven. It
is a function of its inputs alone: the same nodes, seed and results give the same rounds and the
same verdict, so a run can be replayed from its journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from slurm_health.preflight.localize import explain
from slurm_health.preflight.localize.evidence import Fabric, RoundLedger
from slurm_health.preflight.localize.findings import Conclusions, judge
from slurm_health.preflight.localize.pairing import plan_round
from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.preflight.localize.stopping import next_request
from slurm_health.records.errors import LocalizeError
from slurm_health.records.verdict import (
    GroupResult,
    Level,
    LinkVerdict,
    NodeVerdict,
    Outcome,
    Round,
    Verdict,
)

__all__ = [
    "GroupResult",
    "Level",
    "LinkVerdict",
    "LocalizeSettings",
    "Localizer",
    "NodeVerdict",
    "Outcome",
    "Round",
    "Verdict",
]


class Localizer:
    """Plans rounds of pairs, records their results, and concludes.

    `topology` maps leaf switches to nodes. `prior` gives the probability of a node to be bad, from
    its history; it may order the tests but never convict.

    Raises:
        LocalizeError: no nodes, a node named twice, or a prior that is no probability.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        topology: Mapping[str, Sequence[str]] | None = None,
        prior: Mapping[str, float] | None = None,
        settings: LocalizeSettings | None = None,
    ) -> None:
        if not nodes:
            raise LocalizeError("there is no node to test")
        if len(set(nodes)) != len(nodes):
            twice = sorted({node for node in nodes if list(nodes).count(node) > 1})
            raise LocalizeError(f"named twice: {', '.join(twice)}")
        for node, probability in (prior or {}).items():
            if not (math.isfinite(probability) and 0 <= probability <= 1):
                raise LocalizeError(f"the prior of {node} must be a probability, not {probability}")
        self._settings = settings or LocalizeSettings()
        self._ledger = RoundLedger(nodes)
        self._fabric = Fabric.of(nodes, topology)
        numbers = enumerate(nodes)
        self._prior = {number: prior[node] for number, node in numbers if prior and node in prior}
        self._findings: Conclusions | None = None

    def next_round(self) -> Round | None:
        """Return the round to run next, or None when no round can show anything more.

        A round that was planned and not yet observed is returned again.
        """
        rounds = self._ledger.rounds
        if rounds and rounds[-1].index not in self._ledger.observed:
            return rounds[-1]
        request = next_request(self._ledger, self._judged(), self._prior, self._settings)
        if request is None:
            return None
        groups: list[tuple[int, ...]]
        if self._settings.alone or len(request.active) == 1:
            groups = [(node,) for node in request.active]
        else:
            groups = [*plan_round(request)]
        if not groups:
            return None
        return self._ledger.plan(groups, shared_only=request.shared_only)

    def observe(self, round_index: int, results: Iterable[GroupResult]) -> None:
        """Record results of a planned round; late ones count, repeated ones change nothing.

        Raises:
            LocalizeError: the round was never planned, or a result is not one of its groups.
        """
        self._ledger.record(round_index, results)
        self._findings = None

    def verdict(self) -> Verdict:
        """Return the verdict from the results so far."""
        return explain.verdict_of(self._ledger, self._judged(), self._settings)

    def _judged(self) -> Conclusions:
        if self._findings is None:
            trials = self._ledger.in_order()
            self._findings = judge(trials, self._fabric, self._prior, self._settings)
        return self._findings
