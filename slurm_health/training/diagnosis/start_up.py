# SPDX-License-Identifier: Apache-2.0
"""How long a training may stand still before it has a pace: learnt from whether anything moves.

A start takes as long as it takes: compilation uses processors, a checkpoint is read, data comes
over the network. While any rank on any node does such a thing the start gets on, and a stillness
that it has ended by itself is usual for it. Where nothing moves at all, no rank is busy with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.pace import HangPatience
from slurm_health.training.diagnosis.rank_now import IDLE_BYTES_PER_S, RankNow, rests
from slurm_health.training.diagnosis.seen import IDLE_SHARE, Standstill, waiting_ranks

_SHORTEST_S = 1.0  # between two looks, or too little is seen to compare


class Stillness:
    """Since when nothing has moved in any rank of a training. Time is told."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, int], tuple[RankNow, float]] = {}
        self._received: dict[str, tuple[int, float]] = {}
        self._gpu_waits: set[int] = set()
        self._since_s: float | None = None
        self._longest_s = 0.0  # of those that ended by themselves

    def age_s(self, now_s: float) -> float:
        """Return for how long nothing has moved; 0 where that is not known."""
        return 0.0 if self._since_s is None else now_s - self._since_s

    def take(self, ranks: Iterable[RankNow], now_s: float) -> None:
        """Take in how some ranks are now, of one node or of several."""
        for each in ranks:
            key = each.program, each.rank
            before, at_s = self._ranks.get(key, (None, now_s))
            if before is not None and now_s - at_s < _SHORTEST_S:
                continue
            self._ranks[key] = each, now_s
            spins = each.rank in self._gpu_waits
            if before is None or _moved(before, each, now_s - at_s, spins=spins):
                self.end(now_s)

    def receive(self, by_node: Mapping[str, int], now_s: float) -> None:
        """Take in how many bytes the connections of nodes have received so far."""
        for node, so_far in by_node.items():
            before, at_s = self._received.get(node, (so_far, now_s))
            if abs(so_far - before) > IDLE_BYTES_PER_S * max(_SHORTEST_S, now_s - at_s):
                self.end(now_s)
            self._received[node] = so_far, now_s

    def end(self, now_s: float) -> None:
        """Note that something moves or works."""
        self._longest_s = max(self._longest_s, self.age_s(now_s))
        self._since_s = now_s

    def sleep(self, for_s: float) -> None:
        """Leave out a time in which no rank could run: a job is suspended as a whole."""
        if self._since_s is not None:
            self._since_s += for_s
        self._ranks = {key: (now, at_s + for_s) for key, (now, at_s) in self._ranks.items()}

    def left_s(
        self,
        standstill: Standstill,
        flights: FlightRecords,
        *,
        world: int,
        patience: HangPatience,
        now_s: float,
    ) -> float:
        """Return for how long the start may go on to stand still; 0 or less where it hangs.

        Where all ranks wait for each other, none can be busy with the start. One in code of its own
        may wait for what is not seen here, as for a file of another job, and gets longer. One that
        was never seen may still be to come: then nothing is learnt.
        """
        self._gpu_waits = {each.rank for each in standstill.ranks if each.gpu_waits}
        there = [each for each in standstill.ranks if each.pid and not each.gone]
        if not world or len(there) < max(world, len(standstill.ranks)) or standstill.silent:
            return patience.first_s - standstill.stalled_s
        waiting = waiting_ranks(there, flights) | self._gpu_waits
        alike = all(each.rank in waiting for each in there)
        allowance_s = patience.quiet_s if alike else patience.alone_s
        return max(allowance_s, patience.pauses * self._longest_s) - self.age_s(now_s)


def _moved(before: RankNow, now: RankNow, window_s: float, *, spins: bool) -> bool:
    """Tell whether a rank or its children did something between two looks.

    Where its GPU is known to wait it `spins`, and NCCL's threads beside its main one do.
    """
    if now.steps != before.steps or not rests(before, now, window_s):
        return True
    beside_s = now.cpu_s - before.cpu_s - (now.ran_s - before.ran_s)
    return not spins and abs(beside_s) > IDLE_SHARE * window_s
