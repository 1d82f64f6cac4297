# SPDX-License-Identifier: Apache-2.0
"""Ranks that are slower than the others while they train, by the time that is theirs alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import msgspec

# Three ranks at least: of two that differ either may be the slow one.
FEWEST_RANKS = 3
SLOWER = 1.10  # than the median of all ranks, in each of the windows
WINDOWS = 5
FEWEST_STEPS = 3  # in a window


@dataclass(frozen=True, kw_only=True)
class OwnTime:
    """What a rank's steps took by themselves so far, in seconds, and how many steps that were.

    Of it and beside it, so far: how long the rank waited for its data, how long its main thread ran
    and was ready to without a processor, how long its cgroup was held back by a CPU limit.
    """

    seconds: float
    steps: int
    loading_s: float = 0.0
    ran_s: float = 0.0
    unserved_s: float = 0.0
    throttled_s: float = 0.0


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank spends a step, in ms: by itself, and of it and beside it as `OwnTime` has it."""

    own_ms: float = 0.0
    loading_ms: float = 0.0
    ran_ms: float = 0.0
    unserved_ms: float = 0.0
    throttled_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Slower:
    """A rank that was slower in all of the latest windows, and what is usual, per step."""

    rank: int
    ratio: float
    spent: Spent
    usual: Spent


class Stragglers:
    """Compares ranks window by window; says once who is slower, and once when that is over."""

    def __init__(self) -> None:
        self._before: Mapping[int, OwnTime] = {}
        self._windows: deque[dict[int, Spent]] = deque(maxlen=WINDOWS)
        self._named: set[int] = set()

    def window(self, now: Mapping[int, OwnTime]) -> list[Slower]:
        """Close a window with what the ranks have by now; return who is newly known as slower."""
        if any(self._too_few(rank, time) for rank, time in now.items()):
            return []  # too short a window for these steps: it goes on
        spent = {rank: took for rank, time in now.items() if (took := self._spent(rank, time))}
        self._before = dict(now)
        if len(spent) < FEWEST_RANKS:
            self._windows.clear()
            return []
        self._windows.append(spent)
        slower = [each for rank in spent if (each := self._slower(rank))]
        new = [each for each in slower if each.rank not in self._named]
        self._named = {each.rank for each in slower}
        return new

    def _too_few(self, rank: int, time: OwnTime) -> bool:
        before = self._before.get(rank)
        if before is None or not time.steps:
            return False
        return 0 <= time.steps - before.steps < FEWEST_STEPS

    def _spent(self, rank: int, time: OwnTime) -> Spent | None:
        before = self._before.get(rank)
        if before is None or time.steps <= before.steps or time.seconds <= before.seconds:
            return None
        ms = 1e3 / (time.steps - before.steps)
        return Spent(
            own_ms=ms * (time.seconds - before.seconds),
            loading_ms=ms * (time.loading_s - before.loading_s),
            ran_ms=ms * (time.ran_s - before.ran_s),
            unserved_ms=ms * (time.unserved_s - before.unserved_s),
            throttled_ms=ms * (time.throttled_s - before.throttled_s),
        )

    def _slower(self, rank: int) -> Slower | None:
        seen = [
            (window[rank], _middle(window.values())) for window in self._windows if rank in window
        ]
        if len(seen) < WINDOWS or any(own.own_ms < SLOWER * usual.own_ms for own, usual in seen):
            return None
        return Slower(
            rank=rank,
            ratio=median(own.own_ms / usual.own_ms for own, usual in seen),
            spent=_middle([own for own, _ in seen]),
            usual=_middle([usual for _, usual in seen]),
        )


def _middle(spent: Iterable[Spent]) -> Spent:
    every = list(spent)
    return Spent(
        own_ms=median(each.own_ms for each in every),
        loading_ms=median(each.loading_ms for each in every),
        ran_ms=median(each.ran_ms for each in every),
        unserved_ms=median(each.unserved_ms for each in every),
        throttled_ms=median(each.throttled_ms for each in every),
    )
