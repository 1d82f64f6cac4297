# SPDX-License-Identifier: Apache-2.0
"""The measured speed of the processors: the test for a job that calls its node slow."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, NotNegative
from slurm_health.node.rules.finding import Finding, inconclusive, node_fault, passed
from slurm_health.records.errors import Unmeasured
from slurm_health.system.proc import CpuLimits

# A few milliseconds of arithmetic in the caches, during which Python's lock is not held.
_ROUNDS = 10_000
_SECONDS = 0.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Of the processors' time. If others use more of it, a low figure is theirs, not the node's.
_MOST_FOR_OTHERS = 0.1
# Of processor time that root's own threads get. Less is a node fault if a CPU quota caused it.
_LEAST_SHARE = 0.5


class CpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One busy thread per processor, for a while; times are sums over all of them.

    `throttled_s`: how long a CPU quota held this process's group back; `others_s`: how long other
    processes, or other machines on the same hardware, ran.
    """

    processors: int
    wall_s: float
    cpu_s: float
    rounds: int
    throttled_s: float
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
    """The processors are as fast as they were when the node was known to be healthy.

    It keeps every processor busy for half a second, so it runs only for an accusation, while no
    other job is on the node, unless the site says otherwise. On a node that other work uses it is
    inconclusive.
    """

    COMPONENTS = ("node", "compute")
    EXCLUSIVE = True
    CONTEXTS = ("retest",)

    # Of one processor. `init config` writes 60 % of what it measures. 0: not judged.
    min_rounds_per_s: NotNegative = 0

    def measure(self, machine: CheckContext) -> Finding:
        """Keep every processor busy for a while."""
        return self.judge(sample_cpus(machine))

    def judge(self, sample: CpuSample) -> Finding:
        """A quota, or a low speed on a quiet node, is the node's; the rest is undecided. Pure."""
        share, speed_per_s = sample.share, sample.rounds_per_s
        figures = {"share": round(share, 3), "rounds_per_s": round(speed_per_s)}
        time_s = sample.wall_s * sample.processors
        if share < _LEAST_SHARE:
            limit = 100 * _LEAST_SHARE
            text = f"get {100 * share:.0f} % of {sample.processors} processors, limit {limit:g} %"
            if sample.throttled_s < (1 - _LEAST_SHARE) / 2 * time_s:
                return inconclusive(f"the node is busy with other work: root's processes {text}")
            return node_fault(f"held back by a CPU quota: root's processes {text}", **figures)
        speed = f"{speed_per_s:.0f} rounds/s per processor"
        if not self.min_rounds_per_s:
            return inconclusive(f"{speed}; nothing to compare it with: min_rounds_per_s is not set")
        if speed_per_s >= self.min_rounds_per_s:
            return passed(f"{speed}, limit {self.min_rounds_per_s:.0f}", **figures)
        if sample.others_s > _MOST_FOR_OTHERS * time_s:
            return inconclusive(
                f"{speed}, while other work takes {100 * sample.others_s / time_s:.0f} %"
            )
        return node_fault(f"{speed}, limit {self.min_rounds_per_s:.0f}", **figures)


def sample_cpus(machine: CheckContext, seconds: float = _SECONDS) -> CpuSample:
    """Keep every processor busy; return how much was done, and how long others ran.

    Raises:
        Unmeasured: no processor could be kept busy, or the kernel's account cannot be read.
    """
    processors = sorted(os.sched_getaffinity(0))
    limits, process = CpuLimits(), Path("/proc/self")
    held_s, busy_s = limits.throttled_s(process), _busy_s(machine)
    began_s = time.monotonic()
    burners = [_Burner(number, began_s + seconds) for number in processors]
    for burner in burners:
        burner.start()
    for burner in burners:
        burner.join()
    wall_s = time.monotonic() - began_s
    cpu_s = sum(burner.cpu_s for burner in burners)
    if cpu_s <= 0:
        raise Unmeasured("no processor could be kept busy")
    return CpuSample(
        processors=len(processors),
        wall_s=wall_s,
        cpu_s=cpu_s,
        rounds=sum(burner.rounds for burner in burners),
        throttled_s=limits.throttled_s(process) - held_s,
        others_s=max(0.0, _busy_s(machine) - busy_s - cpu_s),
    )


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
