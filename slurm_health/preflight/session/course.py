# SPDX-License-Identifier: Apache-2.0
"""The phases of one check in their order: which round comes next, and what all of them conclude.

It is a function of the rounds that have ended, so a journal can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.preflight.session.conclusion import merged
from slurm_health.preflight.session.phases import Phase
from slurm_health.records.verdict import GroupResult, Level, Round, Verdict

_LEAST_TO_MEET = 2


class RoundPlanner(Protocol):
    """What a course needs of `slurm_health.preflight.localize.localizer.Localizer`."""

    def next_round(self) -> Round | None:
        """Plan the next round; None when enough is known.

        One that was planned and not observed is returned again.
        """

    def observe(self, round_index: int, results: Sequence[GroupResult]) -> None:
        """Take in a round's results."""

    def verdict(self) -> Verdict:
        """Conclude."""


Leaves = Mapping[str, Sequence[str]]
MakeLocalizer = Callable[[Sequence[str], Leaves | None, LocalizeSettings], RoundPlanner]
"""Makes a Localizer for these nodes, and for the leaf switches they hang on if that is known."""


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """A phase that is to be run, and its place among all phases.

    `without` names nodes that are left out of it. With `localizer` it goes on where it was put
    aside. With `joined_by` it is run only if one of these nodes is still in.
    """

    phase: Phase
    place: int
    without: frozenset[str] = frozenset()
    localizer: RoundPlanner | None = None
    joined_by: frozenset[str] = frozenset()


class Course:
    """The phases of one check over the nodes that were admitted to it.

    The rounds of a phase count from 0.
    `settings` are those of the whole run; a phase sets its own rounds and words in them. Phases
    that name their most rounds name their least as well, whatever the settings say.

    A node whose process crashed alone is tested alone again, but not at once: it needs seconds to
    start another one. The others go on to the next phase, and it joins them if it then does well.
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
        self._left = [_Turn(phase=phase, place=place) for place, phase in enumerate(phases)]
        self._turn: _Turn | None = None
        self._make = make_localizer
        self._chosen = settings
        self._localizer: RoundPlanner | None = None
        self._members: tuple[str, ...] = ()  # of the phase in progress
        self._verdicts: list[tuple[int, Verdict]] = []
        self._observed = 0

    def next_round(self, ended: Sequence[Sequence[GroupResult]]) -> Round | None:
        """Return the next round of the phase, None after the last; `ended` are all of the run."""
        while True:
            if self._localizer is None and not self._begin():
                return None
            assert self._localizer is not None
            planned = self._localizer.next_round()
            if planned is None:
                assert self._turn is not None
                self._verdicts.append((self._turn.place, self._localizer.verdict()))
                self._localizer = None
            elif self._put_aside(planned):
                continue
            elif self._observed < len(ended):
                self._localizer.observe(planned.index, ended[self._observed])
                self._observed += 1
            else:
                return planned

    @property
    def members(self) -> Sequence[str]:
        """The nodes of the phase in progress, whichever of them its rounds have; none before."""
        return self._members

    @property
    def phase(self) -> Phase | None:
        """The phase in progress; None before the first."""
        return self._turn.phase if self._turn is not None else None

    def verdict(self) -> Verdict:
        """Return what the phases that have ended conclude together."""
        in_order = sorted(self._verdicts, key=lambda concluded: concluded[0])
        return merged([verdict for _, verdict in in_order])

    def _begin(self) -> bool:
        """Begin the next phase with the nodes that are still well enough; tell if there is one."""
        while self._left:
            turn = self._left.pop(0)
            still_in = self._still_in(turn.phase)
            nodes = [node for node in still_in if node not in turn.without]
            if not nodes or (turn.joined_by and turn.joined_by.isdisjoint(nodes)):
                continue
            self._turn, self._members = turn, tuple(nodes)
            leaves = None if turn.phase.alone else self._known_leaves(nodes)
            settings = self._settings(turn.phase)
            self._localizer = turn.localizer or self._make(nodes, leaves, settings)
            return True
        return False

    def _put_aside(self, planned: Round) -> bool:
        """Let the next phase begin, and this round follow it, if enough others are left for that.

        So it is only where few are tested alone again, and once in a phase.
        """
        again = {node for group in planned.groups for node in group}
        if not self._may_wait or len(self._members) - len(again) < _LEAST_TO_MEET:
            return False
        assert self._turn is not None
        assert self._localizer is not None
        out = self._localizer.verdict().named(Level.FAULTY)
        absent = again.union(out)
        if len(self._members) - len(absent) < _LEAST_TO_MEET:
            return False
        following = self._left[0]
        self._left[:1] = [
            replace(following, without=frozenset(absent)),
            replace(self._turn, localizer=self._localizer),
            replace(following, joined_by=frozenset(again)),
        ]
        self._localizer = None
        return True

    @property
    def _may_wait(self) -> bool:
        """Whether this phase may be put aside: nodes are alone in it, and meet in the next."""
        if self.phase is None or not self.phase.alone or not self._left:
            return False
        return not self._left[0].phase.alone and not self._left[0].joined_by

    def _still_in(self, phase: Phase) -> list[str]:
        """Return the nodes a phase is run with: no training step with one that is known as slow."""
        out = {Level.FAULTY, Level.SLOW} if phase.survivors_only else {Level.FAULTY}
        known = self.verdict().nodes
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
            workload=phase.workload,
        )
