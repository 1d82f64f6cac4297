# SPDX-License-Identifier: Apache-2.0
"""Ranks that are slower than the others while they train, by the time that is theirs alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

# Three ranks at least: of two that differ nobody knows which one is not as it should be.
FEWEST_RANKS = 3
SLOWER = 1.10  # than the median of all ranks, in each of the windows
WINDOWS = 5
FEWEST_STEPS = 3  # in a window


@dataclass(frozen=True, kw_only=True)
class OwnTime:
    """What a rank's steps took by themselves so far, in seconds, and how many steps that were."""

    seconds: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class Slower:
    """A rank that was slower in all of the latest windows; ms of its own per step."""

    rank: int
    ratio: float
    own_ms: float
    usual_ms: float


class Stragglers:
    """Compares ranks window by window; says once who is slower, and once when that is over."""

    def __init__(self) -> None:
        self._before: Mapping[int, OwnTime] = {}
        self._windows: deque[dict[int, tuple[float, float]]] = deque(maxlen=WINDOWS)
        self._named: set[int] = set()

    def window(self, now: Mapping[int, OwnTime]) -> list[Slower]:
        """Close a window with what the ranks have by now; return who is newly known as slower."""
        if any(self._too_few(rank, time) for rank, time in now.items()):
            return []  # too short a window for these steps: it goes on
        own_ms = {rank: ms for rank, time in now.items() if (ms := self._own_ms(rank, time))}
        self._before = dict(now)
        if len(own_ms) < FEWEST_RANKS:
            self._windows.clear()
            return []
        usual_ms = median(own_ms.values())
        self._windows.append({rank: (ms, usual_ms) for rank, ms in own_ms.items()})
        slower = [each for rank in own_ms if (each := self._slower(rank))]
        new = [each for each in slower if each.rank not in self._named]
        self._named = {each.rank for each in slower}
        return new

    def _too_few(self, rank: int, time: OwnTime) -> bool:
        before = self._before.get(rank)
        if before is None or not time.steps:
            return False
        return 0 <= time.steps - before.steps < FEWEST_STEPS

    def _own_ms(self, rank: int, time: OwnTime) -> float:
        before = self._before.get(rank)
        if before is None or time.steps <= before.steps:
            return 0.0
        return 1e3 * (time.seconds - before.seconds) / (time.steps - before.steps)

    def _slower(self, rank: int) -> Slower | None:
        seen = [window[rank] for window in self._windows if rank in window]
        if len(seen) < WINDOWS or any(own < SLOWER * usual for own, usual in seen):
            return None
        return Slower(
            rank=rank,
            ratio=median(own / usual for own, usual in seen),
            own_ms=median(own for own, _ in seen),
            usual_ms=median(usual for _, usual in seen),
        )
