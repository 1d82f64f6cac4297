# SPDX-License-Identifier: Apache-2.0
"""The phases of one check in their order: which round comes next, and what all of them conclude.

It is a function of the rounds that have ended, so a master that takes over an interrupted run
comes to the same round as the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from slurm_health.core.localize.settings import LocalizeSettings
from slurm_health.core.session.conclusion import merged
from slurm_health.core.session.phases import Phase
from slurm_health.core.verdict import GroupResult, Level, Round, Verdict


class Localizer(Protocol):
    """What a course needs of `slurm_health.core.localize.localizer.Localizer`."""

    def next_round(self) -> Round | None:
        """Plan the next round, None when enough is known."""

    def observe(self, round_index: int, results: Sequence[GroupResult]) -> None:
        """Take in a round's results."""

    def verdict(self) -> Verdict:
        """Conclude."""


Leaves = Mapping[str, Sequence[str]]
MakeLocalizer = Callable[[Sequence[str], Leaves | None, LocalizeSettings], Localizer]
"""Makes a Localizer for these nodes, and for the leaf switches they hang on if that is known."""


class Course:
    """The phases of one check over the nodes that were admitted to it.

    `phase` is the one in progress. Its rounds go on counting where the one before it ended.
    `settings` are those of the whole run; a phase sets its own rounds and words in them. Phases
    that name their most rounds name their least as well, whatever the settings say.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        leaves: Leaves | None,
        phases: Sequence[Phase],
        make_localizer: MakeLocalizer,
        settings: LocalizeSettings,
    ) -> None:
        self._nodes = tuple(nodes)
        self._leaves = leaves
        self._left = list(phases)
        self._make = make_localizer
        self._chosen = settings
        self._localizer: Localizer | None = None
        self._verdicts: list[Verdict] = []
        self._observed = 0
        self.phase: Phase | None = None

    def next_round(self, ended: Sequence[tuple[int, Sequence[GroupResult]]]) -> Round | None:
        """Return the next round of the run, None after the last; `ended` are all before it."""
        while True:
            if self._localizer is None and not self._begin():
                return None
            assert self._localizer is not None
            planned = self._localizer.next_round()
            if planned is None:
                self._verdicts.append(self._localizer.verdict())
                self._localizer = None
            elif self._observed < len(ended):
                self._localizer.observe(planned.index, ended[self._observed][1])
                self._observed += 1
            else:
                return planned

    def verdict(self) -> Verdict:
        """Return what the phases that have ended conclude together."""
        return merged(self._verdicts)

    def _begin(self) -> bool:
        """Begin the next phase with the nodes that are still well enough; tell if there is one."""
        while self._left:
            phase = self._left.pop(0)
            nodes = self._still_in(phase)
            if not nodes:
                continue
            self.phase = phase
            leaves = None if phase.alone else self._known_leaves(nodes)
            self._localizer = self._make(nodes, leaves, self._settings(phase))
            return True
        return False

    def _still_in(self, phase: Phase) -> list[str]:
        """Return the nodes a phase is run with: no training step with one that is known as slow."""
        out = {Level.FAULTY, Level.SLOW} if phase.survivors_only else {Level.FAULTY}
        known = merged(self._verdicts).nodes
        return [node for node in self._nodes if node not in known or known[node].level not in out]

    def _known_leaves(self, nodes: Sequence[str]) -> Leaves | None:
        if self._leaves is None:
            return None
        still_in = frozenset(nodes)
        kept = {
            leaf: [node for node in members if node in still_in]
            for leaf, members in self._leaves.items()
        }
        return {leaf: members for leaf, members in kept.items() if members}

    def _settings(self, phase: Phase) -> LocalizeSettings:
        own_rounds = phase.most_rounds is not None
        return replace(
            self._chosen,
            min_rounds=phase.least_rounds if own_rounds else self._chosen.min_rounds,
            max_rounds=phase.most_rounds,
            alone=phase.alone,
            first_round=self._observed,
            workload=phase.workload,
        )
