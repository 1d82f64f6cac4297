# SPDX-License-Identifier: Apache-2.0
"""A row of the table: a source of recordings, and what the product said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Score:
    """How many cases were named rightly, and which were not.

    `innocent` counts ranks or nodes that are held to be at fault and are not; `missed` says in a
    line each what was not right.
    """

    right: int = 0
    undecided: int = 0
    wrong: int = 0
    innocent: int = 0
    missed: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """Return how many there were."""
        return self.right + self.undecided + self.wrong


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
