# SPDX-License-Identifier: Apache-2.0
"""Time what a worker does, window by window, and what others took of its processors meanwhile.

What a group does together is timed equally often on all ranks, and on all of them at once.

Nodes that several jobs share, and virtual machines, lend their processors to others: what is timed
there takes longer, and the node is not to blame. The kernel counts how long each thread was ready
and not served, which includes what its own limit (cpu.max) held it back; that is the node's own.
A worker whose threads are more than its processors waits for itself: nothing beyond what others
really used is theirs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from slurm_health.preflight.probes.context import ProbeContext, Sample

_FIRST_WARM_UPS = 2  # the first iteration alone, on a new connection, shows nothing


class TimingPlan(NamedTuple):
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


def timed(
    context: ProbeContext,
    iteration: Callable[[], object],
    plan: TimingPlan,
    repeat: Callable[[int], object] | None = None,
) -> Sample:
    """Return mean milliseconds per iteration of each window.

    `repeat` does several iterations, in which threads need not wait for each other at each.
    The group agrees on the numbers after the warm-up. Then it waits for all who run the probe,
    the other groups of these nodes too: what shares a link is timed while it is shared.
    """
    alone = context.world_size == 1  # and on a starved processor not to be kept at it for long
    first = min(plan.warm_ups, _FIRST_WARM_UPS)
    times_ms = [_elapsed_ms(context, iteration) for _ in range(first)]
    typical_ms = sum(times_ms) / first if alone else min(times_ms)
    slowest_ms = _slowest_ms(context, typical_ms)
    more = plan.warm_ups - first
    if plan.warm_up_s < math.inf:
        more = min(more, int(plan.warm_up_s * 1e3 / slowest_ms))
    if more:
        later_ms = min(_elapsed_ms(context, iteration) for _ in range(more))
        slowest_ms = _slowest_ms(context, min(typical_ms, later_ms))
    count = max(1, math.ceil(plan.window_s * 1e3 / slowest_ms))
    filling = math.ceil(plan.budget_s * 1e3 / (slowest_ms * count))
    context.meet()
    watch, begun_s = context.compute.watch(), time.perf_counter()
    for window in range(max(plan.least, min(plan.most, filling))):
        if alone and window >= plan.least and time.perf_counter() - begun_s > plan.budget_s:
            break
        context.synchronize()
        watch.begin()
        if repeat is not None:
            repeat(count)
        else:
            for _ in range(count):
                iteration()
        watch.end(count)
    return watch.sample()


def _elapsed_ms(context: ProbeContext, iteration: Callable[[], object]) -> float:
    context.synchronize()
    start = time.perf_counter()
    iteration()
    context.synchronize()
    return (time.perf_counter() - start) * 1e3


def _slowest_ms(context: ProbeContext, elapsed_ms: float) -> float:
    """Return the longest of the ranks' times, the same on all of them, and never 0."""
    own_ms = max(elapsed_ms, 1e-3)
    return float(context.peers.most(own_ms)) if context.world_size > 1 else own_ms


# What others took of the processors.

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_TOLD = 0.01  # less of the time than this is nothing to tell
# Of version 2 in microseconds, of version 1 in nanoseconds (Documentation/admin-guide/cgroup-v2.rst
# and Documentation/scheduler/sched-bwc.rst).
_UNITS_S = {"throttled_usec": 1e-6, "throttled_time": 1e-9}


class Machine(NamedTuple):
    """What the processors that this worker may use have done, and its node's workers by theirs."""

    busy_s: float
    stolen_s: float
    own_s: float


class TimedWindow(NamedTuple):
    """How long it took, and how long the worst served thread waited and the busiest ran in it."""

    elapsed_s: float
    unserved_s: float
    ran_s: float


class Stopwatch:
    """Times windows of work on processors, and what others took of each."""

    def __init__(self) -> None:
        self._limits = list(_limits())
        self._before = _machine()
        self._windows: list[TimedWindow] = []
        self._counts: list[int] = []
        self._begun = (0.0, _threads(), 0.0)

    def begin(self) -> None:
        """Start a window."""
        threads, throttled_s = _threads(), max(map(_throttled_s, self._limits), default=0.0)
        self._begun = time.perf_counter(), threads, throttled_s

    def end(self, iterations: int) -> None:
        """End a window with so many iterations."""
        elapsed_s = time.perf_counter() - self._begun[0]
        throttled_s = max(map(_throttled_s, self._limits), default=0.0) - self._begun[2]
        waited_s, ran_s = 0.0, 0.0
        for thread, (ran_ns, unserved_ns) in _threads().items():
            ran_before_ns, unserved_before_ns = self._begun[1].get(thread, (0, 0))
            waited_s = max(waited_s, (unserved_ns - unserved_before_ns) / 1e9)
            ran_s = max(ran_s, (ran_ns - ran_before_ns) / 1e9)
        self._windows.append(TimedWindow(elapsed_s, max(0.0, waited_s - throttled_s), ran_s))
        self._counts.append(iterations)

    def sample(self) -> Sample:
        """Return the milliseconds of each window per iteration, and what others took of each.

        `taken_ms` is empty where that is next to nothing, or where the kernel does not tell.
        """
        taken_s = taken_of_s(self._windows, self._before, _machine())
        if sum(taken_s) < _TOLD * sum(window.elapsed_s for window in self._windows):
            taken_s = []
        counts = self._counts
        return Sample(
            [window.elapsed_s * 1e3 / n for window, n in zip(self._windows, counts)],  # noqa: B905 - older Pythons run this
            [taken * 1e3 / n for taken, n in zip(taken_s, counts)],  # noqa: B905 - as above
        )


def taken_of_s(windows: Sequence[TimedWindow], before: Machine, after: Machine) -> list[float]:
    """Return what others took of each window, by what the machine did in all of them.

    Never what the busiest thread ran: other threads may have waited beside it, and the work gone
    on. A hypervisor takes of the time in which a thread seems to run: its share of all such time.
    """
    unserved_s = sum(window.unserved_s for window in windows)
    busy_s, stolen_s = after.busy_s - before.busy_s, after.stolen_s - before.stolen_s
    others_s = max(0.0, busy_s - (after.own_s - before.own_s))
    theirs = min(1.0, others_s / unserved_s) if unserved_s else 0.0
    stolen = stolen_s / (busy_s + stolen_s) if stolen_s > 0 else 0.0
    return [
        min(w.unserved_s * theirs, max(0.0, w.elapsed_s - w.ran_s)) + w.ran_s * stolen
        for w in windows
    ]


def _threads() -> dict[str, tuple[int, int]]:
    """Return how long each thread ran, and was ready to and not served; what the kernel counts."""
    threads = {}
    try:
        names = os.listdir("/proc/self/task")  # noqa: PTH208 - pathlib costs a light worker milliseconds
    except OSError:
        return {}
    for name in names:
        words = _text(f"/proc/self/task/{name}/schedstat").split()
        if len(words) == 3:
            threads[name] = (int(words[0]), int(words[1]))
    return threads


def _machine() -> Machine:
    allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy_s = stolen_s = own_s = 0.0
    for line in _text("/proc/stat").splitlines():
        name, *words = line.split()
        if name in allowed and len(words) >= 8:
            user, nice, system, _idle, _wait, irq, soft, steal = map(int, words[:8])
            busy_s += (user + nice + system + irq + soft) * _TICK_S
            stolen_s += steal * _TICK_S
    # What was started with this process is of this node: its workers take nothing of each other.
    parent = str(os.getppid())
    siblings = _text(f"/proc/{parent}/task/{parent}/children").split()
    for pid in {str(os.getpid()), *siblings}:
        words = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        own_s += (int(words[11]) + int(words[12])) * _TICK_S if len(words) > 12 else 0.0
    return Machine(busy_s, stolen_s, own_s)


def _limits() -> Iterator[str]:
    """Yield where the limits of this process's cgroup, and of those above it, are told.

    A mount of version 1 counts if it has processors.
    """
    mounts = []
    for line in _text("/proc/self/mountinfo").splitlines():
        mounted, _, filesystem = line.partition(" - ")
        root, mount = mounted.split()[3:5]
        kind, _, options = filesystem.split(" ", 2)
        if kind == "cgroup2":
            mounts.append((2, root, mount))
        elif kind == "cgroup" and "cpu" in options.rpartition(" ")[2].split(","):
            mounts.append((1, root, mount))
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for version, root, mount in mounts:
            below = f"{path}/".startswith(f"{root.rstrip('/')}/")
            if version == (1 if controllers else 2) and below:
                inside = path[len(root) :].strip("/").split("/")
                for depth in range(len(inside), -1, -1):
                    yield "/".join([mount, *inside[:depth], "cpu.stat"])


def _throttled_s(path: str) -> float:
    for line in _text(path).splitlines():
        name, _, number = line.partition(" ")
        if name in _UNITS_S:
            return int(number) * _UNITS_S[name]
    return 0.0


def _text(path: str) -> str:
    """Return what a file says; nothing where it does not, or where it has just gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - as above
            return file.read()
    except OSError:
        return ""
