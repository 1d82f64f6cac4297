# SPDX-License-Identifier: Apache-2.0
"""Time what a group does together: equally often on all ranks, and on all of them at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from slurm_health.probes.context import ProbeContext


@dataclass(frozen=True)
class Pace:
    """How often something is timed.

    After `warm_ups` that do not count: as many windows as fill `budget_s`, at least `least` and at
    most `most`. A window is one iteration, or as many as `window_s` takes.
    """

    warm_ups: int
    budget_s: float
    least: int
    most: int
    window_s: float = 0.0


def timed_ms(context: ProbeContext, iteration: Callable[[], None], pace: Pace) -> list[float]:
    """Return mean milliseconds per iteration of each window.

    The group agrees on the numbers after the warm-up. Then it waits for all who run the probe,
    the other groups of these nodes too: what shares a link is timed while it is shared.
    """
    typical_ms = min(_elapsed_ms(context, iteration, 1) for _ in range(pace.warm_ups))
    slowest_ms = context.slowest_ms(typical_ms)
    count = max(1, math.ceil(pace.window_s * 1e3 / slowest_ms))
    filling = math.ceil(pace.budget_s * 1e3 / (slowest_ms * count))
    context.meet()
    return [
        _elapsed_ms(context, iteration, count) / count
        for _ in range(max(pace.least, min(pace.most, filling)))
    ]


def _elapsed_ms(context: ProbeContext, iteration: Callable[[], None], count: int) -> float:
    context.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        iteration()
    context.synchronize()
    return (time.perf_counter() - start) * 1e3
