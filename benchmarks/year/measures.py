# SPDX-License-Identifier: Apache-2.0
"""What is counted in a year, and how sure the means over seeds are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import sqrt
from statistics import mean, median, stdev

_HOUR_S = 3600.0
# The 97.5 % points of Student's t with 1, 2, ... degrees of freedom.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
_NORMAL = 1.96


@dataclass
class Tally:
    """What happened, in seconds of a node where it is a time."""

    useful_s: float = 0.0
    allocated_s: float = 0.0
    spare_s: float = 0.0
    capacity_s: float = 0.0
    withheld_s: float = 0.0
    swept_s: float = 0.0
    lost_s: float = 0.0  # work that was done again
    again_s: list[float] = field(default_factory=list)  # from a failure to training again
    faults: int = 0
    strikes: int = 0
    twice: int = 0
    drains: int = 0
    false_drains: int = 0
    refused: int = 0
    trips: int = 0
    lemons: int = 0
    accused_innocent: int = 0
    relapses_by_test: int = 0
    relapses_by_job: int = 0
    relapses_by_nobody: int = 0
    by_test: int = 0
    by_job: int = 0
    persons: int = 0


def figures(tally: Tally) -> dict[str, float]:
    """Return the figures of one run: shares in percent."""
    relapses = tally.relapses_by_test + tally.relapses_by_job
    met = tally.by_test + tally.by_job
    counts = {
        name: float(value)
        for name, value in asdict(tally).items()
        if not name.endswith("_s") and isinstance(value, int)
    }
    return {
        "ratio": 100 * tally.useful_s / max(tally.allocated_s, 1.0),
        "goodput": 100 * tally.useful_s / max(tally.capacity_s, 1.0),
        "again_min": median(tally.again_s) / 60 if tally.again_s else 0.0,
        "again_mean_min": mean(tally.again_s) / 60 if tally.again_s else 0.0,
        "withheld": 100 * tally.withheld_s / max(tally.capacity_s, 1.0),
        "spare": 100 * tally.spare_s / max(tally.capacity_s, 1.0),
        "swept_h": tally.swept_s / _HOUR_S,
        "redone": 100 * tally.lost_s / max(tally.capacity_s, 1.0),
        "relapses_by_test": 100 * tally.relapses_by_test / relapses if relapses else 0.0,
        "faults_by_test": 100 * tally.by_test / met if met else 0.0,
        **{name: value for name, value in counts.items() if name not in {"relapses_by_test"}},
    }


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean over seeds, and half of its 95 % interval; None from a single seed."""

    value: float
    half: float | None


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean and its interval by Student's t."""
    if len(values) < 2:
        return Mean(value=values[0] if values else 0.0, half=None)
    freedom = len(values) - 1
    factor = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL
    return Mean(value=mean(values), half=factor * stdev(values) / sqrt(len(values)))
