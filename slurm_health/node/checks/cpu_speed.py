# SPDX-License-Identifier: Apache-2.0
"""How fast the processors are, measured: what a job that calls its node slow is answered with."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from typing import Annotated

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, NotNegative, Seen
from slurm_health.node.rules.finding import Finding, inconclusive, node_fault, passed
from slurm_health.records.errors import Unmeasured

# A few milliseconds of arithmetic in the caches, during which Python's lock is not held.
_ROUNDS = 10_000
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Of the processors' time. With more of it in other hands a low figure is theirs, not the node's.
_MOST_FOR_OTHERS = 0.1
_CGROUPS = ("/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/cpu")


class CpuSpeedSeen(Seen, frozen=True, kw_only=True):
    """One thread on each processor, for a while; times are sums over all of them."""

    processors: int
    wall_s: float
    cpu_s: float
    rounds: int
    # Seconds a CPU quota held this process's group back.
    throttled_s: float
    # Seconds other processes, or other machines on the same hardware, ran.
    others_s: float

    @property
    def share(self) -> float:
        """Of the processors' time, how much the threads were given."""
        return self.cpu_s / (self.wall_s * self.processors)

    @property
    def rounds_per_s(self) -> float:
        """The speed of one processor while it runs."""
        return self.rounds / self.cpu_s


class CpuSpeed(Check, frozen=True, kw_only=True):
    """The processors are as fast as they were when the node was known to be well.

    It keeps every processor busy for `seconds`, so it runs where a job's check has accused the
    node, and no other job is on it, and nowhere else, unless the site says so.
    """

    SEEN = CpuSpeedSeen
    COMPONENTS = ("node", "compute")
    EXCLUSIVE = True
    CONTEXTS = ("retest",)

    min_rounds_per_s: NotNegative = 0
    min_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    seconds: Annotated[float, msgspec.Meta(ge=0.05, le=60)] = 0.5

    def collect(self, machine: CheckContext) -> CpuSpeedSeen:
        """Keep every processor busy and count what was done, and who else was at work."""
        processors = sorted(os.sched_getaffinity(0))
        throttled_s, busy_s = _throttled_s(machine), _busy_s(machine)
        began_s = time.monotonic()
        burners = [_Burner(number, began_s + self.seconds) for number in processors]
        for each in burners:
            each.start()
        for each in burners:
            each.join()
        wall_s = time.monotonic() - began_s
        cpu_s = sum(each.cpu_s for each in burners)
        if cpu_s <= 0:
            raise Unmeasured("no processor could be kept busy")
        return CpuSpeedSeen(
            processors=len(processors),
            wall_s=wall_s,
            cpu_s=cpu_s,
            rounds=sum(each.rounds for each in burners),
            throttled_s=_throttled_s(machine) - throttled_s,
            others_s=max(0.0, _busy_s(machine) - busy_s - cpu_s),
        )

    def judge(self, seen: CpuSpeedSeen) -> Finding:
        """A quota, or a low speed on a quiet node, is the node's; all else is not decided here."""
        figures = {"share": round(seen.share, 3), "rounds_per_s": round(seen.rounds_per_s)}
        time_s = seen.wall_s * seen.processors
        if seen.share < self.min_share:
            got = (
                f"get {seen.share:.0%} of {seen.processors} processors, limit {self.min_share:.0%}"
            )
            if seen.throttled_s < (1 - self.min_share) / 2 * time_s:
                return inconclusive(f"the node is busy with other work: root's processes {got}")
            return node_fault(f"held back by a CPU quota: root's processes {got}", **figures)
        speed = f"{seen.rounds_per_s:.0f} rounds/s on each processor"
        if not self.min_rounds_per_s:
            return inconclusive(f"{speed}; nothing to compare it with: min_rounds_per_s is not set")
        if seen.rounds_per_s >= self.min_rounds_per_s:
            return passed(f"{speed}, limit {self.min_rounds_per_s:.0f}", **figures)
        if seen.others_s > _MOST_FOR_OTHERS * time_s:
            return inconclusive(f"{speed}, while other work takes {seen.others_s / time_s:.0%}")
        return node_fault(f"{speed}, limit {self.min_rounds_per_s:.0f}", **figures)


class _Burner(threading.Thread):
    """Keeps one processor busy until a given time."""

    def __init__(self, processor: int, until_s: float) -> None:
        super().__init__(daemon=True)
        self.processor = processor
        self.until_s = until_s
        self.rounds = 0
        self.cpu_s = 0.0

    def run(self) -> None:
        os.sched_setaffinity(0, {self.processor})  # of this thread
        while not self.rounds or time.monotonic() < self.until_s:
            hashlib.pbkdf2_hmac("sha256", b"slurm-health", b"salt", _ROUNDS)
            self.rounds += _ROUNDS
        self.cpu_s = time.thread_time()


def _busy_s(machine: CheckContext) -> float:
    """Return the seconds that all processors have been at work, or taken away, since the boot."""
    words = machine.read("/proc/stat").split("\n", 1)[0].split()
    try:
        user, nice, system, _idle, _wait, irq, soft, steal = (int(word) for word in words[1:9])
    except ValueError as err:
        raise Unmeasured(f"/proc/stat begins with {' '.join(words)[:80]!r}") from err
    return (user + nice + system + irq + soft + steal) / _TICKS_PER_S


def _throttled_s(machine: CheckContext) -> float:
    """Return how long a quota has held this process's group, or one above it, back; 0 for none."""
    found = [0.0]
    for line in (machine.read_or_none("/proc/self/cgroup") or "").splitlines():
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        for base in _CGROUPS if controllers else ("/sys/fs/cgroup",):
            found += [_throttled_in(machine, f"{base}{above}") for above in _upwards(path)]
    return max(found)


def _upwards(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    return ["/" + "/".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _throttled_in(machine: CheckContext, directory: str) -> float:
    pairs = [
        line.split() for line in (machine.read_or_none(f"{directory}/cpu.stat") or "").splitlines()
    ]
    found = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
    return found.get("throttled_usec", 0) / 1e6 + found.get("throttled_time", 0) / 1e9
