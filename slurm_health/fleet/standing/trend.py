# SPDX-License-Identifier: Apache-2.0
"""Whether a figure rises or falls: Theil and Sen's slope, where Mann and Kendall's test finds one.

Both go by medians and ranks, so that one odd measurement changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import erfc, inf, sqrt
from statistics import median

import msgspec

# With fewer points the test finds nothing short of a monotone series.
_LEAST_POINTS = 8
# The slope takes every pair, and what was long before says little of now.
_MOST_POINTS = 50
# One series in a hundred without a trend shows one.
_SIGNIFICANCE = 0.01
# What repeated runs of one probe differ by; docs/performance.md has how much that is.
_LEAST_CHANGE = 0.02


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """By which share a figure has changed over so many days; negative where it fell."""

    change: float
    days: float


def trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """Return the trend of (seconds, value), in the order of time; None where none is proven."""
    latest = points[-_MOST_POINTS:]
    count = len(latest)
    if count < _LEAST_POINTS:
        return None
    values = [value for _, value in latest]
    balance = sum((later > first) - (later < first) for first, later in combinations(values, 2))
    deviation = sqrt(count * (count - 1) * (2 * count + 5) / 18)
    chance = erfc(max(0, abs(balance) - 1) / deviation / sqrt(2))
    middle = median(values)
    if chance >= _SIGNIFICANCE or middle <= 0:
        return None
    slopes = [
        (later[1] - first[1]) / (later[0] - first[0])
        for first, later in combinations(latest, 2)
        if later[0] > first[0]
    ]
    span_s = latest[-1][0] - latest[0][0]
    change = median(slopes) * span_s / middle if slopes else 0.0
    if not _LEAST_CHANGE <= abs(change) < inf:
        return None
    return Trend(change=change, days=span_s / 86400)
