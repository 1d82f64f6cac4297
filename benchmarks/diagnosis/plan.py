# SPDX-License-Identifier: Apache-2.0
"""What one run does, chosen from its seed: the cause, the rank, the step. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.diagnosis.causes import Cause, Ends

RANKS = 3  # fewer, and nobody can tell which of two that differ is not as it should be
FIRST_STEP, LAST_STEP = 9, 40
# That a training becomes slower is seen once it is known how fast it was.
SLOWER_FROM, SLOWER_TO = 180, 240
# Of a hang in the first steps nobody can know that it is one; a failure may come at once.
_EARLIEST_FAILURE = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run: at `step` it happens to `rank`. The data loader has `workers` processes."""

    cause: Cause
    seed: int
    step: int
    rank: int
    workers: int

    @property
    def node(self) -> str:
        """Where the rank runs: Slurm numbers tasks in the order of the nodes."""
        return f"n{self.rank + 1}"

    def __str__(self) -> str:
        return f"{self.cause.name}, seed {self.seed}: rank {self.rank} at step {self.step}"


def plan_of(cause: Cause, seed: int) -> Plan:
    """Return what the run of a seed does: always the same."""
    random = Random(f"{cause.name} {seed}")
    first, last = FIRST_STEP, LAST_STEP
    if cause.ends is Ends.SLOWS:
        first, last = SLOWER_FROM, SLOWER_TO
    elif cause.ends in {Ends.STOPS, Ends.GOES_ON} and not cause.outside:
        first = _EARLIEST_FAILURE
    return Plan(
        cause=cause,
        seed=seed,
        step=random.randint(first, last),
        rank=random.randint(1 if cause.spares_first_node else 0, RANKS - 1),
        # A loader with workers fetches ahead, which hides that it is slow.
        workers=random.choice((0, 1)) if cause.ends is not Ends.SLOWS else 0,
    )


def plans(causes: Sequence[Cause], runs: int, seed: int) -> Iterator[Plan]:
    """Yield all runs, each cause once before any cause comes again."""
    for number in range(runs):
        for cause in causes:
            yield plan_of(cause, seed + number)
