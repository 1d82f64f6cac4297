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
from collections.abc import Callable, Iterable, Sequence
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


# All-gathers over sockets are on the plateau of their bandwidth with this much of each rank. The
# first transfers of a connection wait for each other's acknowledgements and for the window to open:
# they take ten times as long as later ones. A slow link takes long enough for each: three times are
# enough to tell it from one that is not.
SOCKET_BYTES_PER_RANK = 4 << 20
WARM_UP_ITERATIONS = 5
SOCKET_PACE = TimingPlan(
    warm_ups=WARM_UP_ITERATIONS, budget_s=0.3, least=3, most=20, warm_up_s=0.25
)


def windows_of(work: Callable[[], object], *, window_s: float, windows: int) -> Sample:
    """Return mean milliseconds of one call of the work, window after window of at least so long."""
    watch = Stopwatch()
    for _ in range(windows):
        watch.begin()
        count, elapsed_s = 0, 0.0
        start = time.perf_counter()
        while elapsed_s < window_s:
            work()
            count += 1
            elapsed_s = time.perf_counter() - start
        watch.end(count)
    return watch.sample()


def each(work: Callable[[], object], *, least: int, most: int, budget_s: float) -> Sample:
    """Return milliseconds of each call of the work: as many as fit, so that a starved CPU ends."""
    watch, calls = Stopwatch(), 0
    begun = time.perf_counter()
    while calls < least or (calls < most and time.perf_counter() - begun < budget_s):
        watch.begin()
        work()
        watch.end(1)
        calls += 1
    return watch.sample()


def timed(context: ProbeContext, iteration: Callable[[], object], pace: TimingPlan) -> Sample:
    """Return mean milliseconds per iteration of each window.

    The group agrees on the numbers after the warm-up. Then it waits for all who run the probe,
    the other groups of these nodes too: what shares a link is timed while it is shared.
    """
    slowest_ms = _warm_up(context, iteration, pace)
    count = max(1, math.ceil(pace.window_s * 1e3 / slowest_ms))
    filling = math.ceil(pace.budget_s * 1e3 / (slowest_ms * count))
    context.meet()
    watch = Stopwatch()
    for _ in range(max(pace.least, min(pace.most, filling))):
        context.synchronize()
        watch.begin()
        _run(context, iteration, count)
        watch.end(count)
    sample = watch.sample()
    # A device goes on with what it was given while its host waits: that is no time of its own.
    return sample._replace(taken_ms=[]) if context.on_cuda else sample


def _warm_up(context: ProbeContext, iteration: Callable[[], object], pace: TimingPlan) -> float:
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


# What others took of the processors.

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_TOLD = 0.01  # less of the time than this is nothing to tell
# Of version 2 in microseconds, of version 1 in nanoseconds (Documentation/admin-guide/cgroup-v2.rst
# and Documentation/scheduler/sched-bwc.rst).
_UNITS_S = {"throttled_usec": 1e-6, "throttled_time": 1e-9}


class _Seen(NamedTuple):
    """Clocks at one moment: `unserved_ns` and `ran_ns` of each thread, both with limits."""

    at_s: float
    threads: dict[str, tuple[int, int]]
    throttled_s: float


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
    """Times windows of work, and what others took of each."""

    def __init__(self) -> None:
        self._limits = list(_limits())
        self._before = _machine()
        self._windows: list[TimedWindow] = []
        self._per_window: list[float] = []
        self._begun: _Seen | None = None

    def begin(self) -> None:
        """Start a window."""
        self._begun = self._look()

    def end(self, iterations: float, elapsed_s: float | None = None) -> None:
        """End a window with so many iterations, which took all of it or what is said."""
        begun, now = self._begun, self._look(late=True)
        assert begun is not None
        waited_s, ran_s = 0.0, 0.0
        for thread, (ran_ns, unserved_ns) in now.threads.items():
            ran_before_ns, unserved_before_ns = begun.threads.get(thread, (0, 0))
            waited_s = max(waited_s, (unserved_ns - unserved_before_ns) / 1e9)
            ran_s = max(ran_s, (ran_ns - ran_before_ns) / 1e9)
        unserved_s = max(0.0, waited_s - (now.throttled_s - begun.throttled_s))
        took_s = now.at_s - begun.at_s if elapsed_s is None else elapsed_s
        self._windows.append(TimedWindow(took_s, unserved_s, ran_s))
        self._per_window.append(iterations)

    def sample(self) -> Sample:
        """Return the milliseconds of each window per iteration, and what others took of each.

        `taken_ms` is empty where that is next to nothing, or where the kernel does not tell.
        """
        taken_s = taken_of_s(self._windows, self._before, _machine())
        if sum(taken_s) < _TOLD * sum(each.elapsed_s for each in self._windows):
            taken_s = []
        counts = self._per_window
        return Sample(
            [each.elapsed_s * 1e3 / n for each, n in zip(self._windows, counts)],  # noqa: B905 - older Pythons run this
            [taken * 1e3 / n for taken, n in zip(taken_s, counts)],  # noqa: B905 - as above
        )

    def _look(self, *, late: bool = False) -> _Seen:
        """Read all clocks; `late`: the one of the wall first, so that reading is not timed."""
        at_s = time.perf_counter() if late else 0.0
        threads, throttled_s = _threads(), max(map(_throttled_s, self._limits), default=0.0)
        return _Seen(at_s if late else time.perf_counter(), threads, throttled_s)


def taken_of_s(windows: Sequence[TimedWindow], before: Machine, after: Machine) -> list[float]:
    """Return what others took of each window, by what the machine did in all of them.

    Never what the busiest thread ran: other threads may have waited beside it, and the work gone
    on. A hypervisor takes of the time in which a thread seems to run: its share of all such time.
    """
    unserved_s = sum(each.unserved_s for each in windows)
    busy_s, stolen_s = after.busy_s - before.busy_s, after.stolen_s - before.stolen_s
    others_s = max(0.0, busy_s - (after.own_s - before.own_s))
    theirs = min(1.0, others_s / unserved_s) if unserved_s else 0.0
    stolen = stolen_s / (busy_s + stolen_s) if stolen_s > 0 else 0.0
    return [
        min(each.unserved_s * theirs, max(0.0, each.elapsed_s - each.ran_s)) + each.ran_s * stolen
        for each in windows
    ]


def _threads() -> dict[str, tuple[int, int]]:
    """Return how long each thread ran, and was ready to and not served; what the kernel counts."""
    found = {}
    for thread in _entries("/proc/self/task"):
        words = _text(f"/proc/self/task/{thread}/schedstat").split()
        if len(words) == 3:
            found[thread] = (int(words[0]), int(words[1]))
    return found


def _machine() -> Machine:
    allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy_s = stolen_s = 0.0
    for line in _text("/proc/stat").splitlines():
        name, *words = line.split()
        if name in allowed and len(words) >= 8:
            user, nice, system, _idle, _wait, irq, soft, steal = map(int, words[:8])
            busy_s += (user + nice + system + irq + soft) * _TICK_S
            stolen_s += steal * _TICK_S
    return Machine(busy_s, stolen_s, sum(map(_cpu_s, _of_this_node())))


def _of_this_node() -> Iterable[str]:
    """Return this process and those that were started with it: a node's workers are one node's."""
    parent = str(os.getppid())
    siblings = _text(f"/proc/{parent}/task/{parent}/children").split()
    return {str(os.getpid()), *siblings}


def _cpu_s(pid: str) -> float:
    words = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) * _TICK_S if len(words) > 12 else 0.0


def _limits() -> Iterable[str]:
    """Yield where the limits of this process's cgroup, and of those above it, are told."""
    mounts = list(_mounts())
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for version, root, mount in mounts:
            if version != (1 if controllers else 2) or not _is_below(path, root):
                continue
            if controllers and "cpu" not in controllers.split(","):
                continue
            inside = path[len(root) :].strip("/").split("/")
            for depth in range(len(inside), -1, -1):
                yield "/".join([mount, *inside[:depth], "cpu.stat"])


def _mounts() -> Iterable[tuple[int, str, str]]:
    """Yield of each hierarchy with processors: its version, what of it is mounted, and where."""
    for line in _text("/proc/self/mountinfo").splitlines():
        mounted, _, filesystem = line.partition(" - ")
        root, mount = mounted.split()[3:5]
        kind, _, options = filesystem.split(" ", 2)
        if kind == "cgroup2":
            yield 2, root, mount
        elif kind == "cgroup" and "cpu" in options.rpartition(" ")[2].split(","):
            yield 1, root, mount


def _is_below(path: str, root: str) -> bool:
    return f"{path}/".startswith(f"{root.rstrip('/')}/")


def _throttled_s(path: str) -> float:
    for line in _text(path).splitlines():
        name, _, number = line.partition(" ")
        if name in _UNITS_S:
            return int(number) * _UNITS_S[name]
    return 0.0


def _entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208 - pathlib costs a light worker milliseconds
    except OSError:
        return []


def _text(path: str) -> str:
    """Return what a file says; nothing where it does not, or where it has just gone."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - as above
            return file.read()
    except OSError:
        return ""
