# SPDX-License-Identifier: Apache-2.0
"""Ranks that are slower than those with the same work, by the time that is theirs alone.

What a rank has to do depends on its role, such as its stage of a pipeline, and on its tokens, where
heartbeats tell them; what is uneven of that is `uneven`'s to say, and makes no rank slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import msgspec

# Three ranks at least: of two that differ either may be the slow one.
FEWEST_RANKS = 3
SLOWER = 1.10  # than the median of the ranks with its role, in each of the windows
# Where no role is known: so many slower ranks have another role, rather than a fault each.
_CROWD, _CROWD_SHARE = 2, 1 / 4
WINDOWS = 5
FEWEST_STEPS = 3  # in a window


@dataclass(frozen=True, kw_only=True)
class OwnTime:
    """What a rank's steps took by themselves so far, in seconds, and how many steps that were.

    Of it and beside it, so far: how long the rank waited for its data, how long its main thread ran
    and was ready to without a processor, how long its cgroup was held back by a CPU limit. Of its
    work: `tokens` so far, its role, and the replica of the model that it is of; 0, "" and -1 where
    that is not known.
    """

    seconds: float
    steps: int
    loading_s: float = 0.0
    ran_s: float = 0.0
    unserved_s: float = 0.0
    throttled_s: float = 0.0
    tokens: float = 0.0
    role: str = ""
    replica: int = -1


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank spends a step, in ms: by itself, and of it and beside it as `OwnTime` has it.

    `tokens` are those of a step.
    """

    own_ms: float = 0.0
    loading_ms: float = 0.0
    ran_ms: float = 0.0
    unserved_ms: float = 0.0
    throttled_ms: float = 0.0
    tokens: float = 0.0

    def is_slower(self, usual: Spent) -> bool:
        """Tell whether it takes longer than is usual, also for as many tokens."""
        return self.own_ms >= SLOWER * usual.own_ms * max(1.0, self.times_tokens(usual))

    def times_tokens(self, usual: Spent) -> float:
        """Return how many times the usual tokens it has, 1 where either does not tell them."""
        return self.tokens / usual.tokens if self.tokens and usual.tokens else 1.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """What each rank spent on a step in a window of time, with its role and its replica.

    `usual` is the median of each role; `judged` has the roles of which there are enough ranks.
    """

    spent: Mapping[int, Spent]
    roles: Mapping[int, str]
    replicas: Mapping[int, int]
    usual: Mapping[str, Spent]
    judged: frozenset[str]

    def usual_of(self, rank: int) -> Spent | None:
        """Return what is usual for a rank, None where too few do the same."""
        role = self.roles.get(rank)
        return self.usual[role] if role in self.judged else None


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
        self.windows: deque[Window] = deque(maxlen=WINDOWS)
        self.crowd: tuple[Slower, ...] = ()  # slower, and too many to be held slow
        self._named: set[int] = set()

    def window(self, now: Mapping[int, OwnTime]) -> list[Slower]:
        """Close a window with what the ranks have by now; return who is newly known as slower."""
        if any(self._too_few(rank, time) for rank, time in now.items()):
            return []  # too short a window for these steps: it goes on
        spent = {rank: took for rank, time in now.items() if (took := self._spent(rank, time))}
        self._before = dict(now)
        if len(spent) < FEWEST_RANKS:
            self.windows.clear()
            return []
        self.windows.append(_window(spent, now))
        slower = [each for rank in spent if (each := self._slower(rank))]
        alike = not any(now[rank].role for rank in spent)
        crowd = alike and len(slower) >= max(_CROWD, _CROWD_SHARE * len(spent))
        self.crowd, slower = (tuple(slower), []) if crowd else ((), slower)
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
            tokens=(time.tokens - before.tokens) / (time.steps - before.steps),
        )

    def _slower(self, rank: int) -> Slower | None:
        seen = [
            (window.spent[rank], usual)
            for window in self.windows
            if rank in window.spent and (usual := window.usual_of(rank))
        ]
        if len(seen) < WINDOWS or not all(own.is_slower(usual) for own, usual in seen):
            return None
        return Slower(
            rank=rank,
            ratio=median(own.own_ms / usual.own_ms for own, usual in seen),
            spent=_middle([own for own, _ in seen]),
            usual=_middle([usual for _, usual in seen]),
        )


def _window(spent: Mapping[int, Spent], now: Mapping[int, OwnTime]) -> Window:
    by_role: dict[str, list[Spent]] = {}
    for rank, each in spent.items():
        by_role.setdefault(now[rank].role, []).append(each)
    return Window(
        spent=spent,
        roles={rank: now[rank].role for rank in spent},
        replicas={rank: now[rank].replica for rank in spent},
        usual={role: _middle(every) for role, every in by_role.items()},
        judged=frozenset(role for role, every in by_role.items() if len(every) >= FEWEST_RANKS),
    )


def _middle(spent: Iterable[Spent]) -> Spent:
    every = list(spent)
    return Spent(
        own_ms=median(each.own_ms for each in every),
        loading_ms=median(each.loading_ms for each in every),
        ran_ms=median(each.ran_ms for each in every),
        unserved_ms=median(each.unserved_ms for each in every),
        throttled_ms=median(each.throttled_ms for each in every),
        tokens=median(each.tokens for each in every),
    )
