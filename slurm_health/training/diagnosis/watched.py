# SPDX-License-Identifier: Apache-2.0
"""All ranks of a job as its monitors tell them, and whether they stand still. Time is told."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.pace import PATIENCE, HangPatience, NextLook, allowance_s
from slurm_health.training.diagnosis.rank_now import RankLook, RankNow
from slurm_health.training.diagnosis.seen import (
    BrokenPath,
    RankSeen,
    Standstill,
    cannot_be_well,
    loading_ranks,
    still_works,
    waiting_ranks,
)
from slurm_health.training.diagnosis.slow_steps import Longer, RankSteps, SlowSteps
from slurm_health.training.diagnosis.start_up import Stillness
from slurm_health.training.diagnosis.stragglers import OwnTime, Slower, SlowRank, Stragglers
from slurm_health.training.diagnosis.uneven import Uneven, Unevenness

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 120.0  # from one look at all nodes to the next
_SUSPENDED_S = 60.0  # in which no node says anything, and each says something every ten


@dataclass(frozen=True, kw_only=True)
class Pause:
    """For how long nothing has shown that a training goes on, in seconds.

    A pause of `allowance_s` would be usual. `step` is the last one, 0 where that is not known, and
    `window_s` the time between the two looks at its processes.
    """

    stalled_s: float
    allowance_s: float
    window_s: float
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What a closer look at all nodes showed; ranks are told by their program and number.

    Args:
        before: the ranks as they were then.
        looks: what they answered.
        paths: connections that do not get through.
        silent: the nodes that did not answer.
        not_seen: what could not be looked at, and why.
        received: how many bytes the connections of each node had received.
    """

    before: Mapping[tuple[str, int], RankNow]
    looks: Mapping[tuple[str, int], RankLook]
    paths: tuple[BrokenPath, ...] = ()
    silent: tuple[str, ...] = ()
    not_seen: Mapping[str, str] = field(default_factory=dict)
    received: Mapping[str, int] = field(default_factory=dict)

    def then(self, later: Looked) -> Looked:
        """Return what a later look showed, with how the ranks were at this one."""
        return replace(later, before=self.before)

    def standstill(
        self,
        program: Program,
        nodes: tuple[str, ...],
        pause: Pause,
    ) -> tuple[Standstill, FlightRecords]:
        """Return what was seen of one program, at this look and at what was heard after it."""
        looks = {rank: look for (name, rank), look in self.looks.items() if name == program.name}
        ranks = tuple(
            _seen(
                rank, last, self.before.get((program.name, rank)), looks.get(rank), pause.window_s
            )
            for rank, last in sorted(program.ranks.items())
        )
        standstill = Standstill(
            stalled_s=pause.stalled_s,
            allowance_s=pause.allowance_s,
            step=pause.step,
            nodes=nodes,
            ranks=(*ranks, *([] if self.silent else _never_seen(ranks, program.world, nodes))),
            paths=self.paths,
            silent=self.silent,
            not_seen=dict(self.not_seen),
        )
        flights = [look.flight for _, look in sorted(looks.items()) if look.flight is not None]
        return standstill, FlightRecords(records=tuple(flights))


@dataclass(kw_only=True)
class _Last:
    """The last that was heard of a rank, and when."""

    node: str
    now: RankNow
    heard_s: float
    gone: bool = False

    def age_s(self, now_s: float) -> float:
        return self.now.age_s + max(0.0, now_s - self.heard_s)


@dataclass(kw_only=True)
class Program:
    """The ranks of one step of the job, or of its script itself."""

    name: str
    ranks: dict[int, _Last] = field(default_factory=dict)
    stragglers: Stragglers = field(default_factory=Stragglers)
    unevenness: Unevenness = field(default_factory=Unevenness)
    slow_steps: SlowSteps = field(default_factory=SlowSteps)
    next_look: NextLook = field(default_factory=lambda: NextLook(_FIRST_PAUSE_S, _LONGEST_PAUSE_S))
    hung_s: float | None = None  # since when, once that was said
    stillness: Stillness = field(default_factory=Stillness)

    @property
    def alive(self) -> list[_Last]:
        """The ranks that have not ended."""
        return [each for each in self.ranks.values() if not each.gone]

    @property
    def beating(self) -> list[_Last]:
        """The ranks with a heartbeat that have not ended; where all have, how they were."""
        beating = [each for each in self.ranks.values() if each.now.steps]
        return [each for each in beating if not each.gone] or beating

    @property
    def step(self) -> int:
        """The latest step of any rank."""
        return max((each.now.step for each in self.ranks.values()), default=0)

    @property
    def world(self) -> int:
        """How many ranks it has, 0 where that is not told."""
        return max((each.now.world for each in self.ranks.values()), default=0)

    def stalled_s(self, now_s: float) -> float:
        """Return since when no rank has come to another step; 0 where none has a heartbeat."""
        return min((each.age_s(now_s) for each in self.beating), default=0.0)

    @property
    def is_young(self) -> bool:
        """Whether a rank with a heartbeat has too few steps for a pace."""
        return any(each.now.pace.is_young for each in self.ranks.values() if each.now.steps)

    def allowance_s(self, patience: HangPatience) -> float:
        """Return how long a pause would be usual."""
        return allowance_s(
            [each.now.pace for each in self.ranks.values() if each.now.steps], patience
        )


class WatchedPrograms:
    """All programs of a job."""

    def __init__(self, nodes: Sequence[str], patience: HangPatience = PATIENCE) -> None:
        self._nodes = tuple(nodes)
        self._patience = patience
        self._heard_s = math.inf
        self.programs: dict[str, Program] = {}

    def hear(self, node: str, ranks: Iterable[RankNow], now_s: float) -> list[Program]:
        """Take in what a node told; return the programs that were said to hang, and go on."""
        told = {(each.program, each.rank): each for each in ranks}
        unheard_s = now_s - self._heard_s
        self._heard_s = now_s
        for (name, rank), now in told.items():
            program = self.programs.setdefault(name, Program(name=name))
            program.ranks[rank] = _Last(node=node, now=now, heard_s=now_s)
            if unheard_s > _SUSPENDED_S:
                program.stillness.end(now_s)
            program.stillness.take([now], now_s)
        for program in list(self.programs.values()):
            for rank, last in program.ranks.items():
                if last.node == node and (program.name, rank) not in told:
                    last.gone = True
            if not program.alive:
                del self.programs[program.name]
        return [each for each in self.programs.values() if self._goes_on(each, now_s)]

    def suspect(self, now_s: float) -> Program | None:
        """Return a program that has stood still for longer than is usual for it, and is to be seen.

        A program that was said to hang is not looked at again before it has gone on.
        """
        for each in self.programs.values():
            stalled_s = each.stalled_s(now_s)
            late = stalled_s >= each.allowance_s(self._patience)
            if each.next_look.is_due(now_s, late=late) and each.hung_s is None:
                return each
        return None

    def judge(
        self, program: Program, looked: Looked, *, window_s: float, now_s: float
    ) -> tuple[Standstill, FlightRecords] | str:
        """Return what was seen of a program that hangs, or why it does not hang so far.

        Args:
            program: which was suspected, and has been looked at.
            looked: what that showed, `window_s` before the last that was heard of its ranks.
            window_s: so long was between the two, seconds.
            now_s: the time.
        """
        pause = Pause(
            stalled_s=program.stalled_s(now_s),
            allowance_s=program.allowance_s(self._patience),
            window_s=window_s,
            step=program.step,
        )
        standstill, flights = looked.standstill(program, self._nodes, pause)
        reason = "it goes on" if standstill.stalled_s < standstill.allowance_s else ""
        reason = reason or still_works(
            standstill,
            waiting_ranks(standstill.ranks, flights),
            self._patience,
            loading=loading_ranks(standstill.ranks),
        )
        program.stillness.receive(looked.received, now_s - window_s)
        # Sooner where it is known when more will be known.
        limits_s = (self._patience.reading_s, self._patience.storage_s)
        left_s = [limit_s - standstill.stalled_s for limit_s in limits_s]
        gone = any(each.gone and each.pid for each in standstill.ranks)
        if reason:
            program.stillness.end(now_s)
        elif program.is_young and not gone and not cannot_be_well(standstill):
            start_s = program.stillness.left_s(
                standstill, flights, world=program.world, patience=self._patience, now_s=now_s
            )
            left_s.append(start_s)
            if start_s > 0:
                reason = "it has no pace yet, and nothing is seen that its start does not explain"
        if reason:
            soon_s = min((each for each in left_s if each > 0), default=math.inf)
            program.next_look.put_off(now_s, at_most_s=soon_s)
            return reason
        program.hung_s = now_s - standstill.stalled_s
        return standstill, flights

    def window(self) -> list[tuple[SlowRank, float]]:
        """Close a window of time; return the ranks newly known to be slower, and how many times."""
        found: list[tuple[SlowRank, float]] = []
        for program in self.programs.values():
            own = {
                rank: _own_time(last.now) for rank, last in program.ranks.items() if not last.gone
            }
            slow = program.stragglers.window(own)
            found += [(_slow_rank(each, program.ranks[each.rank]), each.ratio) for each in slow]
        return found

    def uneven(self) -> list[Uneven]:
        """Return what is newly known to be uneven, by the windows so far."""
        return [
            each
            for program in self.programs.values()
            for each in program.unevenness.newly(
                tuple(program.stragglers.windows),
                program.stragglers.crowd,
                {rank: last.node for rank, last in program.ranks.items()},
            )
        ]

    def slower(self) -> list[tuple[Program, Longer]]:
        """Close a window of time; return the programs whose steps take longer than before."""
        found: list[tuple[Program, Longer]] = []
        for program in self.programs.values():
            steps = {
                rank: RankSteps(
                    steps=last.now.steps,
                    last_s=last.heard_s - last.now.age_s,
                    own_s=last.now.own_s,
                    own_steps=last.now.own_steps,
                )
                for rank, last in program.ranks.items()
                if not last.gone
            }
            longer = program.slow_steps.window(steps)
            if longer is not None:
                found.append((program, longer))
        return found

    def _goes_on(self, program: Program, now_s: float) -> bool:
        """Tell whether a program that was said to hang has come to another step since."""
        if program.hung_s is None:
            return False
        hung_for_s = min(now_s - program.hung_s, self._patience.at_least_s)
        return program.stalled_s(now_s) < hung_for_s


def _slow_rank(slower: Slower, last: _Last) -> SlowRank:
    return SlowRank(
        rank=slower.rank,
        node=last.node,
        spent=slower.spent,
        usual=slower.usual,
        tells_loading=last.now.batches > 0,
    )


def _own_time(now: RankNow) -> OwnTime:
    return OwnTime(
        seconds=now.own_s,
        steps=now.own_steps,
        loading_s=now.loading_s,
        ran_s=now.ran_s,
        unserved_s=now.unserved_s,
        throttled_s=now.throttled_s,
        tokens=now.tokens,
        role=now.role,
        replica=now.replica,
    )


def _seen(
    rank: int, last: _Last, before: RankNow | None, look: RankLook | None, window_s: float
) -> RankSeen:
    share, unserved_share, io_bytes = 0.0, 0.0, 0
    if before is not None and window_s > 0:
        # A child that has ended takes its figures along.
        share = abs(last.now.cpu_s - before.cpu_s) / window_s
        unserved_share = (last.now.unserved_s - before.unserved_s) / window_s
        io_bytes = abs(last.now.io_bytes - before.io_bytes)
    return RankSeen(
        rank=rank,
        node=last.node,
        pid=last.now.pid,
        step=last.now.step,
        batches=last.now.batches,
        data_ended=last.now.data_ended,
        gone=last.gone,
        state=last.now.state,
        kernel=look.kernel if look else "",
        cpu_share=round(share, 3),
        unserved_share=round(unserved_share, 3),
        io_bytes=io_bytes,
        gpu_share=look.gpu_share if look else 0.0,
        gpu_waits=look is not None and look.gpu_waits,
        answered=look is not None and look.answered,
        stack=look.stack if look else (),
    )


def _never_seen(ranks: Sequence[RankSeen], world: int, nodes: Sequence[str]) -> list[RankSeen]:
    """Return the ranks that had ended before the first look.

    Which node they were on is known where a single one has fewer ranks than the others.
    """
    numbers = {each.rank for each in ranks}
    missing = [number for number in range(world) if number not in numbers]
    on_node = Counter(dict.fromkeys(nodes, 0))
    on_node.update(each.node for each in ranks)
    fewer = [node for node, count in on_node.items() if count < max(on_node.values(), default=0)]
    node = fewer[0] if len(fewer) == 1 else ""
    return [RankSeen(rank=number, node=node, gone=True) for number in missing]
