# SPDX-License-Identifier: Apache-2.0
"""Whether a training that says nothing hangs: its ranks' main threads have come to rest.

A main thread that trains runs, waits and runs again, many times in every step. In a hang it waits
in one call, or spins in it, and never comes back. The ranks of one node show that: those of a
training wait for each other, so that all come to rest when one does. They are looked at every few
seconds; a training pauses in its own way, so that its longest rest counts. Rest alone decides
nothing: it has all nodes looked at, and only ranks that are known to wait for others are told of.

`judged` is what decides then, also where it was the job's output that stood still.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.pace import HangPatience, NextLook, RankPace, allowance_s
from slurm_health.training.diagnosis.rank_now import RankNow, rests
from slurm_health.training.diagnosis.seen import (
    Standstill,
    cannot_be_well,
    loading_ranks,
    still_works,
    waiting_ranks,
)
from slurm_health.training.diagnosis.start_up import Stillness
from slurm_health.training.diagnosis.watched import Looked, Pause, WatchedPrograms

# Against rests between looks at which a main thread had run.
MOVEMENT_PATIENCE = HangPatience(at_least_s=40.0, steps=2.0, pauses=2.0)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 15.0, 600.0  # from one look at all nodes to the next
_LOADED_S = 3.0  # that a main thread needs before it trains: to load its libraries alone
Judged = tuple[Standstill, FlightRecords] | str


class Movement:
    """The ranks of one node, look by look. Its time is told."""

    def __init__(self, patience: HangPatience = MOVEMENT_PATIENCE) -> None:
        self._patience = patience
        self._program = ""
        self._ranks: dict[int, RankNow] = {}
        self._seen_s = self._first_s = self._moved_s = self._longest_s = 0.0
        self._moves = self._in_a_row = 0
        self._next_look = NextLook(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._stillness = Stillness()  # on all nodes, from look to look at them
        self.hung_s: float | None = None  # since when, once that was said

    def take(self, ranks: Sequence[RankNow], now_s: float) -> None:
        """Take in how the ranks are now; the program that has the most of them counts."""
        names = [each.program for each in ranks]
        program = max(sorted(set(names)), key=names.count, default="")
        told = {each.rank: each for each in ranks if each.program == program}
        if program != self._program:
            self._begin(program, now_s)
        elif not _at_rest(self._ranks, told, now_s - self._seen_s):
            self._move(now_s)
        else:
            self._in_a_row = 0
        self._ranks, self._seen_s = told, now_s

    def sleep(self, for_s: float) -> None:
        """Leave out a time in which we did not run: a job is suspended as a whole."""
        self._moved_s += for_s
        self._seen_s += for_s
        self._stillness.sleep(for_s)

    @property
    def allowance_s(self) -> float:
        """How long a rest would be usual."""
        return allowance_s([self._pace], self._patience)

    @property
    def _pace(self) -> RankPace:
        typical_s = (self._moved_s - self._first_s) / max(1, self._moves)
        return RankPace(steps=self._moves, typical_s=typical_s, longest_s=self._longest_s)

    def stalled_s(self, now_s: float) -> float:
        """Return since when all main threads have been at rest."""
        return now_s - self._moved_s if self._ranks else 0.0

    def suspect(self, now_s: float) -> bool:
        """Tell whether all nodes are to be looked at: not before some time after a look."""
        late = self.stalled_s(now_s) >= self.allowance_s
        if self._pace.is_young and any(each.ran_s < _LOADED_S for each in self._ranks.values()):
            late = False  # it has not begun, or is no training: nothing is started beside it
        return self._next_look.is_due(now_s, late=late) and self.hung_s is None

    def goes_on(self, now_s: float) -> float | None:
        """Return how long a training stood still that was said to hang, and goes on; else None."""
        if self.hung_s is None or self._in_a_row < 2:
            return None
        stalled_s, self.hung_s = now_s - self.hung_s, None
        return stalled_s

    def not_now(self, now_s: float) -> None:
        """Put off the next look: this one showed a rank at work, or nothing."""
        self._next_look.put_off(now_s)

    def judge(
        self,
        watched: WatchedPrograms,
        looked: Looked,
        nodes: Sequence[str],
        *,
        window_s: float,
        now_s: float,
    ) -> Judged:
        """Return what was seen of the training, or why it does not hang as far as is known.

        `looked` was `window_s` before the last that the monitors told; it is `now_s`.
        """
        pause = Pause(
            stalled_s=self.stalled_s(now_s), allowance_s=self.allowance_s, window_s=window_s
        )
        found = judged(watched, looked, nodes, pause, self._patience)
        reason = found if isinstance(found, str) else ""
        reason = reason or _someone_moved(watched, looked, window_s)
        left_s = self._patience.first_s
        if reason:
            self._stillness.end(now_s)
        elif not isinstance(found, str):
            left_s = self._left_s(*found, watched, looked, window_s, now_s)
            if left_s > 0 or not self._is_known_to_wait(*found):
                reason = "no rank is known to wait for another"
        if reason:
            self._next_look.put_off(now_s, at_most_s=max(left_s, _FIRST_PAUSE_S))
            return reason
        self.hung_s = self._moved_s
        self._in_a_row = 0
        return found

    def _left_s(
        self,
        standstill: Standstill,
        flights: FlightRecords,
        watched: WatchedPrograms,
        looked: Looked,
        window_s: float,
        now_s: float,
    ) -> float:
        """Return how long ranks may rest so before they have moved for a while; 0 after that."""
        ranks = [last.now for each in watched.programs.values() for last in each.ranks.values()]
        self._stillness.take(looked.before.values(), now_s - window_s)
        self._stillness.take(ranks, now_s)
        self._stillness.receive(looked.received, now_s)
        if cannot_be_well(standstill) or not self._pace.is_young:
            return 0.0
        world = max((each.world for each in watched.programs.values()), default=0)
        return self._stillness.left_s(
            standstill, flights, world=world, patience=self._patience, now_s=now_s
        )

    @staticmethod
    def _is_known_to_wait(standstill: Standstill, flights: FlightRecords) -> bool:
        """Tell whether ranks wait for others; a service or a notebook only rests."""
        if cannot_be_well(standstill):
            return True
        gpus_wait = any(each.gpu_waits for each in standstill.ranks)
        return gpus_wait or bool(waiting_ranks(standstill.ranks, flights))

    def _begin(self, program: str, now_s: float) -> None:
        self._program = program
        self._first_s = self._moved_s = now_s
        self._longest_s = 0.0
        self._moves = 0
        self._stillness = Stillness()
        self.hung_s = None

    def _move(self, now_s: float) -> None:
        self._moves += 1
        self._in_a_row += 1
        if self.hung_s is None:
            self._longest_s = max(self._longest_s, self._seen_s - self._moved_s)
        self._moved_s = now_s


def _at_rest(before: Mapping[int, RankNow], now: Mapping[int, RankNow], window_s: float) -> bool:
    same = before.keys() == now.keys()
    return same and all(rests(before[rank], now[rank], window_s) for rank in now)


def _someone_moved(watched: WatchedPrograms, looked: Looked, window_s: float) -> str:
    """Say which rank's main thread ran between the two looks, on whichever node."""
    for (program, rank), before in looked.before.items():
        last = watched.programs[program].ranks.get(rank) if program in watched.programs else None
        if last is not None and not last.gone and not rests(before, last.now, window_s):
            return f"rank {rank} on {last.node} still runs"
    return ""


def judged(
    watched: WatchedPrograms,
    looked: Looked,
    nodes: Sequence[str],
    pause: Pause,
    patience: HangPatience,
) -> Judged:
    """Return what was seen of the training, or why it does not hang so far.

    Args:
        watched: all that the monitors told,
        looked: what a closer look showed `pause.window_s` before the last of it.
        nodes: those of the job.
        pause: since when nothing showed that it goes on.
        patience: with ranks that work.
    """
    stills = [
        looked.standstill(program, tuple(nodes), pause) for program in watched.programs.values()
    ]
    if not stills:
        return "no process of the training can be seen"
    for still, flights in stills:
        waiting = waiting_ranks(still.ranks, flights)
        loading = loading_ranks(still.ranks)
        if reason := still_works(still, waiting, patience, loading=loading):
            return reason
    # A job may run more than its training; that is what has the most ranks.
    return max(stills, key=lambda each: len(each[0].ranks))
