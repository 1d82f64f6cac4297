# SPDX-License-Identifier: Apache-2.0
"""What a node's monitor tells of one rank, and whether the rank rested between two such times.

And which GPU a rank trains on, and whether that works or only waits. A collective that waits for
its peers runs a kernel that asks for them again and again. NVML shows that GPU as used all the
time, as it shows one that works; but next to nothing moves through its memory, and it draws little
power. All of this together, in every sample, is taken for waiting. Where one of them is not told, a
GPU that is used works.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from slurm_health.training.diagnosis.collected import FlightRecord
from slurm_health.training.diagnosis.pace import RankPace
from slurm_health.training.diagnosis.seen import Frame

# A main thread that only waits comes back so often, as from waits with a time limit, and runs for
# next to nothing; on a starved node it may be ready to run for longer. One that spins runs all the
# time, or is ready to, and does not wait in the kernel.
_WAKES_PER_S = 0.5
_RESTS_SHARE, _READY_SHARE, _SPINS_SHARE = 0.002, 0.05, 0.9
IDLE_BYTES_PER_S = 16 << 10  # that a rank and its children read and write
# Of a GPU that waits: used for so much of the time at least, its memory for so much at most, and
# power at most so much of what it may draw. The driver's sample of one that works may miss one sign
# of these for a moment, so all samples count.
_WAITS_USED, _WAITS_MEMORY, _WAITS_POWER = 0.9, 0.01, 0.4
_FEWEST_SAMPLES = 3
# What a process holds for its context alone is less than this share of what it trains with.
_CONTEXT_SHARE = 0.25


class RankNow(msgspec.Struct, frozen=True, array_like=True):
    """One rank at this moment; the program it belongs to is a step of the job, or its script.

    Of its heartbeat: the step, how many so far, seconds since the last, what one takes, the longest
    pause, seconds of its own in so many steps, of which it waited `loading_s` for its data, which
    has given so many batches, and may have ended: all 0 of a rank without one. `cpu_s` and
    `io_bytes` are of it and its children. `world` is how many ranks there are, 0 where that is not
    told. Its main thread ran for `ran_s`, was ready to for `unserved_s` without a processor, and
    went to wait in the kernel `wakes` times; `throttled_s` is how long its cgroup was held back by
    a CPU limit. 0 where that is not known.
    Its work, as far as the heartbeat tells that: `tokens` so far, its `role`, by which ranks do the
    same, and the `replica` of the model that it belongs to, -1 where that is not known.
    """

    program: str
    rank: int
    pid: int
    state: str
    cpu_s: float
    io_bytes: int
    step: int = 0
    steps: int = 0
    age_s: float = 0.0
    typical_s: float = 0.0
    longest_s: float = 0.0
    own_s: float = 0.0
    own_steps: int = 0
    world: int = 0
    loading_s: float = 0.0
    batches: int = 0
    data_ended: bool = False
    ran_s: float = 0.0
    unserved_s: float = 0.0
    throttled_s: float = 0.0
    wakes: int = 0
    tokens: float = 0.0
    role: str = ""
    replica: int = -1

    @property
    def pace(self) -> RankPace:
        """How it gets on."""
        return RankPace(steps=self.steps, typical_s=self.typical_s, longest_s=self.longest_s)


class RankLook(msgspec.Struct, frozen=True, array_like=True):
    """What one rank answered, and what it and its children wait for in the kernel.

    `gpu_share` is the share of time in which their GPU was used, 0 where that is not known, and
    `gpu_waits` tells that it did next to nothing in it.
    """

    program: str
    rank: int
    answered: bool
    kernel: str
    stack: tuple[Frame, ...] = ()
    flight: FlightRecord | None = None
    gpu_share: float = 0.0
    gpu_waits: bool = False


def rests(before: RankNow, now: RankNow, window_s: float) -> bool:
    """Tell whether a rank's main thread waited in one place, or spun in it, between two looks."""
    if window_s <= 0 or before.pid != now.pid:
        return False
    moved_bytes = abs(now.io_bytes - before.io_bytes)
    woke = now.wakes - before.wakes
    ran = (now.ran_s - before.ran_s) / window_s
    ready = (now.unserved_s - before.unserved_s) / window_s
    waits = (ran <= _RESTS_SHARE and ready <= _READY_SHARE) or ran + ready >= _SPINS_SHARE
    return waits and woke <= _WAKES_PER_S * window_s and moved_bytes <= IDLE_BYTES_PER_S * window_s


class GpuSample(msgspec.Struct, frozen=True, array_like=True):
    """One moment of a GPU: shares of time in which kernels ran and its memory was used; watts."""

    used: float
    memory_used: float | None = None
    power_w: float | None = None


class SampledGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU for a second or two: who has opened it, with how many bytes, and what it did.

    Bytes are None where NVML does not tell them, as inside some containers. `limit_w` is the power
    that it may draw, None where that is not told.
    """

    processes: dict[int, int | None] = {}
    samples: tuple[GpuSample, ...] = ()
    limit_w: float | None = None

    @property
    def share(self) -> float:
        """Of time in which it was used; the highest sample counts."""
        return max((each.used for each in self.samples), default=0.0)

    @property
    def waits(self) -> bool:
        """Whether it was used all the time, for next to nothing."""
        return len(self.samples) >= _FEWEST_SAMPLES and all(map(self._waits_in, self.samples))

    def _waits_in(self, sample: GpuSample) -> bool:
        if sample.memory_used is None or sample.power_w is None or self.limit_w is None:
            return False
        little = sample.power_w <= _WAITS_POWER * self.limit_w
        return sample.used >= _WAITS_USED and sample.memory_used <= _WAITS_MEMORY and little


class GpuUse(msgspec.Struct, frozen=True, array_like=True):
    """What a process's GPUs do: the share of time they are used, and whether they only wait."""

    share: float = 0.0
    waits: bool = False


def by_process(gpus: Sequence[SampledGpu]) -> dict[int, GpuUse]:
    """Return what each process's own GPUs do.

    PyTorch's NCCL watchdog opens the first GPU of its node in every process, beside the one that
    the process trains on. That one is told by its memory, else by how few have opened it.
    """
    pids = dict.fromkeys(pid for gpu in gpus for pid in gpu.processes)
    return {pid: _use_of(_own(pid, gpus)) for pid in pids}


def all_of(uses: Iterable[GpuUse]) -> GpuUse:
    """Return what the GPUs of several processes do, as those of a rank and its children."""
    busy = [each for each in uses if each.share]
    return GpuUse(
        share=max((each.share for each in busy), default=0.0),
        waits=bool(busy) and all(each.waits for each in busy),
    )


def _own(pid: int, gpus: Sequence[SampledGpu]) -> list[SampledGpu]:
    opened = [each for each in gpus if pid in each.processes]
    fullest = max(opened, key=lambda each: (_bytes(pid, each.processes), -len(each.processes)))
    least_bytes = _CONTEXT_SHARE * _bytes(pid, fullest.processes)
    return [
        each
        for each in opened
        if _bytes(pid, each.processes) >= least_bytes
        and len(each.processes) <= len(fullest.processes)
    ]


def _use_of(gpus: Iterable[SampledGpu]) -> GpuUse:
    return all_of(GpuUse(each.share, each.waits) for each in gpus)


def _bytes(pid: int, processes: Mapping[int, int | None]) -> int:
    return processes[pid] or 0
