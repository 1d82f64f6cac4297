# SPDX-License-Identifier: Apache-2.0
"""Find the bad nodes, links and leaves of a run by testing pairs of nodes, round after round.

The Localizer plans each round from the evidence so far and says in the end what is proven. It
is a function of its inputs alone: the same nodes, seed and results give the same rounds and the
same verdict, so a run can be replayed from its journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from slurm_health.preflight.localize import explain
from slurm_health.preflight.localize.evidence import Fabric, RoundLedger
from slurm_health.preflight.localize.findings import Conclusions, judge
from slurm_health.preflight.localize.pairing import PlanState, plan_round
from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.preflight.localize.stopping import Needs, needs_of
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
    """Plans rounds of pairs, takes in their results, and concludes.

    `topology` maps leaf switches to nodes; `prior` gives the probability of a node to be bad,
    from its history, and may order the tests but never convict.

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
        self._settings = settings or LocalizeSettings()
        self._ledger = RoundLedger(nodes)
        self._fabric = Fabric.of(nodes, topology)
        self._prior = _numbered_prior(nodes, prior or {})
        self._findings: Conclusions | None = None

    def next_round(self, index: int | None = None) -> Round | None:
        """Return the round to run next, or None when nothing more can usefully be learnt.

        It gets the number `index`, where the run has other rounds besides. A round that was
        planned and not yet observed is returned again.
        """
        rounds = self._ledger.rounds
        if rounds and rounds[-1].index not in self._ledger.observed:
            return rounds[-1] if index is None else self._ledger.renumber_last(index)
        needs = needs_of(self._ledger, self._judged(), self._prior, self._settings)
        if not needs.another_round:
            return None
        groups = self._groups(needs)
        if not groups:
            return None
        number = len(rounds) if index is None else index
        return self._ledger.plan(groups, number, shared_only=needs.shared_only)

    def observe(self, round_index: int, results: Iterable[GroupResult]) -> None:
        """Take in results of a planned round; late ones are welcome, repeated ones change nothing.

        Raises:
            LocalizeError: the round was never planned, or a result is not one of its groups.
        """
        self._ledger.record(round_index, results)
        self._findings = None

    def verdict(self) -> Verdict:
        """Return what is concluded from the results so far."""
        return explain.verdict_of(self._ledger, self._judged(), self._settings)

    def _judged(self) -> Conclusions:
        if self._findings is None:
            trials = self._ledger.in_order()
            self._findings = judge(trials, self._fabric, self._prior, self._settings)
        return self._findings

    def _groups(self, needs: Needs) -> list[tuple[int, ...]]:
        if len(needs.active) == 1:
            return [needs.active]
        if self._settings.alone:
            return [(node,) for node in needs.active]
        standing = PlanState(
            active=needs.active,
            risk=needs.risk,
            undecided=needs.undecided,
            trusted=needs.trusted,
            met=self._ledger.met,
            byes=needs.byes,
            leaf=self._fabric.leaf,
            repeats=needs.repeats,
            seed=self._settings.seed,
            round_index=len(self._ledger.rounds),
            tested_in_leaf=needs.tested_in_leaf,
            suspect_leaves=needs.suspect_leaves,
        )
        return list(plan_round(standing))


def _numbered_prior(nodes: Sequence[str], prior: Mapping[str, float]) -> dict[int, float]:
    """Return the prior by node number; other nodes' history is of no concern here."""
    for node, probability in prior.items():
        if not (math.isfinite(probability) and 0 <= probability <= 1):
            raise LocalizeError(f"the prior of {node} must be a probability, not {probability}")
    return {number: prior[node] for number, node in enumerate(nodes) if node in prior}
