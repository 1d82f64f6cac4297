# SPDX-License-Identifier: Apache-2.0
"""Time what a group does together: equally often on all ranks, and on all of them at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from slurm_health.preflight.probes.context import ProbeContext
from slurm_health.preflight.probes.processors import Times, Watch

_FIRST_WARM_UPS = 2  # the first iteration alone, on a new connection, shows nothing


class Pace(NamedTuple):
    """How often something is timed.

    After `warm_ups` that do not count: as many windows as fill `budget_s`, at least `least` and at
    most `most`. A window is one iteration, or as many as `window_s` takes. Of the warm-ups beyond
    the second only those are run that `warm_up_s` has room for: what takes long needs fewer.
    """

    warm_ups: int
    budget_s: float
    least: int
    most: int
    window_s: float = 0.0
    warm_up_s: float = math.inf


# All-gathers over sockets are on the plateau of their bandwidth with this much of each rank. The
# first transfers of a connection wait for each other's acknowledgements and for the window to open:
# they take ten times as long as later ones. A slow link takes long enough for each: three times are
# enough to tell it from one that is not.
SOCKET_BYTES_PER_RANK = 4 << 20
WARM_UP_ITERATIONS = 5
SOCKET_PACE = Pace(warm_ups=WARM_UP_ITERATIONS, budget_s=0.3, least=3, most=20, warm_up_s=0.25)


def windows_of(work: Callable[[], object], *, window_s: float, windows: int) -> Times:
    """Return mean milliseconds of one call of the work, window after window of at least so long."""
    watch = Watch()
    for _ in range(windows):
        watch.begin()
        count, elapsed_s = 0, 0.0
        start = time.perf_counter()
        while elapsed_s < window_s:
            work()
            count += 1
            elapsed_s = time.perf_counter() - start
        watch.end(count)
    return watch.times()


def each(work: Callable[[], object], *, least: int, most: int, budget_s: float) -> Times:
    """Return milliseconds of each call of the work: as many as fit, so that a starved CPU ends."""
    watch, calls = Watch(), 0
    begun = time.perf_counter()
    while calls < least or (calls < most and time.perf_counter() - begun < budget_s):
        watch.begin()
        work()
        watch.end(1)
        calls += 1
    return watch.times()


def timed(context: ProbeContext, iteration: Callable[[], object], pace: Pace) -> Times:
    """Return mean milliseconds per iteration of each window.

    The group agrees on the numbers after the warm-up. Then it waits for all who run the probe,
    the other groups of these nodes too: what shares a link is timed while it is shared.
    """
    slowest_ms = _warm_up(context, iteration, pace)
    count = max(1, math.ceil(pace.window_s * 1e3 / slowest_ms))
    filling = math.ceil(pace.budget_s * 1e3 / (slowest_ms * count))
    context.meet()
    watch = Watch()
    for _ in range(max(pace.least, min(pace.most, filling))):
        context.synchronize()
        watch.begin()
        _run(context, iteration, count)
        watch.end(count)
    times = watch.times()
    # A device goes on with what it was given while its host waits: that is no time of its own.
    return Times(times.iteration_ms, []) if context.on_cuda else times


def _warm_up(context: ProbeContext, iteration: Callable[[], object], pace: Pace) -> float:
    """Run what does not count; return the quickest iteration's time, on the slowest rank."""
    first = min(pace.warm_ups, _FIRST_WARM_UPS)
    typical_ms = min(_elapsed_ms(context, iteration, 1) for _ in range(first))
    slowest_ms = context.slowest_ms(typical_ms)
    more = pace.warm_ups - first
    if pace.warm_up_s < math.inf:
        more = min(more, int(pace.warm_up_s * 1e3 / slowest_ms))
    if not more:
        return slowest_ms
    later_ms = min(_elapsed_ms(context, iteration, 1) for _ in range(more))
    return context.slowest_ms(min(typical_ms, later_ms))


def _elapsed_ms(context: ProbeContext, iteration: Callable[[], object], count: int) -> float:
    context.synchronize()
    start = time.perf_counter()
    _run(context, iteration, count)
    return (time.perf_counter() - start) * 1e3


def _run(context: ProbeContext, iteration: Callable[[], object], count: int) -> None:
    for _ in range(count):
        iteration()
    context.synchronize()
