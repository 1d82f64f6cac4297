# SPDX-License-Identifier: Apache-2.0
"""How long a training may stand still before that is remarkable, by its own steps."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

# Below these, what is said of steps is said of too few of them.
_FEW_STEPS = 8


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """What a standstill is measured against, seconds.

    Args:
        at_least_s: a shorter one is never looked at: an evaluation, a pause of the filesystem.
        steps: a training may pause for so many of its usual steps,
        pauses: or for so many times its longest pause since it began, as for a checkpoint.
        first_s: before it has a pace of its own: compilation, loading of a model and of data.
        storage_s: where a rank waits for storage in the kernel, which may be slow and well, as it
            is while all that was written to a checkpoint goes to disks,
        reading_s: and where its data loader does: nothing that is read takes so long.
        working_s: where others wait for a rank that still computes, reads or writes.
    """

    at_least_s: float = 25.0
    steps: float = 10.0
    pauses: float = 1.5
    first_s: float = 1800.0
    storage_s: float = 120.0
    reading_s: float = 40.0
    working_s: float = 1800.0


PATIENCE = Patience()


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank gets on: steps so far, what one takes, its longest pause between two."""

    steps: int
    typical_s: float
    longest_s: float


def allowance_s(paces: Iterable[Pace], patience: Patience = PATIENCE) -> float:
    """Return how long ranks may stand still together; the most patient pace counts."""
    return max((_allowance_s(each, patience) for each in paces), default=patience.first_s)


def _allowance_s(pace: Pace, patience: Patience) -> float:
    if pace.steps < _FEW_STEPS:
        return max(patience.first_s, patience.at_least_s)
    return max(
        patience.at_least_s,
        patience.steps * pace.typical_s,
        patience.pauses * pace.longest_s + pace.typical_s,
    )
