# SPDX-License-Identifier: Apache-2.0
"""How long a training may stand still before that is remarkable, and when to look again."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

# Below these, what is said of steps is said of too few of them.
_FEW_STEPS = 8


class HangPatience(msgspec.Struct, frozen=True, kw_only=True):
    """What a standstill is measured against, seconds.

    Args:
        at_least_s: a shorter one is never looked at: an evaluation, a pause of the filesystem.
        steps: a training may pause for so many of its usual steps,
        pauses: or for so many times its longest pause since it began, as for a checkpoint.
        first_s: before it has a pace of its own: compilation, loading of a model and of data,
        young_s: and before that where what is seen then cannot be well: a rank that is stopped,
        quiet_s: or where nothing moves on any node, and all ranks are known to wait for others,
        alone_s: or one of them for what is not seen.
        storage_s: where a rank waits for storage in the kernel, which may be slow and well, as it
            is while all that was written to a checkpoint goes to disks,
        reading_s: and where its data loader does: nothing that is read takes so long.
        working_s: where others wait for a rank that still computes, reads or writes.
    """

    at_least_s: float = 25.0
    steps: float = 10.0
    pauses: float = 1.5
    first_s: float = 1800.0
    young_s: float = 60.0
    quiet_s: float = 120.0
    alone_s: float = 900.0
    storage_s: float = 120.0
    reading_s: float = 40.0
    working_s: float = 1800.0


PATIENCE = HangPatience()


class RankPace(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank gets on: steps so far, what one takes, its longest pause between two."""

    steps: int
    typical_s: float
    longest_s: float

    @property
    def is_young(self) -> bool:
        """Whether there are too few steps to compare with."""
        return self.steps < _FEW_STEPS


class NextLook:
    """When something that stood still, and was no hang yet, is looked at again. Time is told.

    Soon at first, then less and less often; as at first once it has gone on.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._pause_s = self._not_before_s = 0.0

    def is_due(self, now_s: float, *, late: bool) -> bool:
        """Tell whether to look now at what is late to go on, or is not."""
        if not late:
            self._pause_s = 0.0
        return late and now_s >= self._not_before_s

    def put_off(self, now_s: float, *, at_most_s: float = math.inf) -> None:
        """Look again after a pause, and `at_most_s` from now."""
        self._pause_s = min(max(self._first_s, 2 * self._pause_s), self._longest_s)
        self._not_before_s = now_s + min(self._pause_s, at_most_s)


def allowance_s(paces: Iterable[RankPace], patience: HangPatience = PATIENCE) -> float:
    """Return how long ranks may stand still together; the most patient pace counts."""
    return max((_allowance_s(each, patience) for each in paces), default=patience.first_s)


def _allowance_s(pace: RankPace, patience: HangPatience) -> float:
    if pace.is_young:
        return max(patience.young_s, patience.at_least_s, patience.pauses * pace.longest_s)
    return max(
        patience.at_least_s,
        patience.steps * pace.typical_s,
        patience.pauses * pace.longest_s + pace.typical_s,
    )
