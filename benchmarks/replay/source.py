# SPDX-License-Identifier: Apache-2.0
"""A row of the table: a source of recordings, and what the product said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.replay.contested import why_contested
from slurm_health.node.rules.finding import Status


class CannotRead(Exception):
    """What it takes to read a recording is not installed; says what."""


@dataclass
class Score:
    """How many cases were named rightly, and which were not.

    `innocent` counts ranks or nodes that are held to be at fault and are not; `missed` says in a
    line each what was not right; `contested` counts what is not right by its source alone, for
    `contested.CONTESTED` says why.
    """

    right: int = 0
    undecided: int = 0
    wrong: int = 0
    innocent: int = 0
    contested: int = 0
    missed: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """Return how many there were."""
        return self.right + self.undecided + self.wrong + self.contested

    def miss(self, told: str, *, undecided: bool, why_contested: str = "") -> None:
        """Count what is not right, and say in a line what it was."""
        if why_contested:
            self.contested += 1
            told += f" (contested: {why_contested})"
        else:
            self.undecided += undecided
            self.wrong += not undecided
        self.missed.append(told)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Recordings below `place` of the directory of all, and what reads them.

    `anchor` is what the recordings' owners, or their tool, name rightly; `seen` whether they had
    been looked at before the code that judges them was written.
    """

    name: str
    place: str
    anchor: str
    seen: bool
    score: Callable[[Path], Score]

    def find(self, recordings: Path) -> Path | None:
        """Return where they lie, also below a directory with another name; None where nowhere."""
        for found in (recordings / self.place, *sorted(recordings.glob(f"*/{self.place}"))):
            if found.exists():
                return found
        return None


# What was recorded, in words; what it comes to here; whether it is a fault of the node there.
Case = tuple[str, Status, bool]


def scored(source: str, cases: Callable[[Path], Iterator[Case]]) -> Callable[[Path], Score]:
    """Return what scores findings of a node: a warning leaves a case undecided."""

    def score(place: Path) -> Score:
        score = Score()
        for text, status, is_fault in cases(place):
            if (status is Status.NODE_FAULT) is is_fault:
                score.right += 1
                continue
            score.innocent += status is Status.NODE_FAULT
            score.miss(
                f"{status.name}: {text.strip()[:120]!r}",
                undecided=status in {Status.WARN, Status.INCONCLUSIVE},
                why_contested=why_contested(source, text) if is_fault else "",
            )
        return score

    return score
