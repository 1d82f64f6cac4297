# SPDX-License-Identifier: Apache-2.0
"""Which GPU a rank trains on, and whether that works or only waits; what NVML says is given.

A collective that waits for its peers runs a kernel that asks for them again and again. NVML shows
that GPU as used all the time, as it shows one that works; but next to nothing moves through its
memory, and it draws little power. All of this together, in every sample, is taken for waiting.
Where one of them is not told, a GPU that is used works.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

# Of a GPU that waits: used for so much of the time at least, its memory for so much at most, and
# power at most so much of what it may draw. The driver's sample of one that works may miss one sign
# of these for a moment, so all samples count.
_WAITS_USED, _WAITS_MEMORY, _WAITS_POWER = 0.9, 0.01, 0.4
_FEWEST_SAMPLES = 3
# What a process holds for its context alone is less than this share of what it trains with.
_CONTEXT_SHARE = 0.25


class GpuSample(msgspec.Struct, frozen=True, array_like=True):
    """One moment of a GPU: shares of time in which kernels ran and its memory was used; watts."""

    used: float
    memory_used: float | None = None
    power_w: float | None = None


class GpuSeen(msgspec.Struct, frozen=True, kw_only=True):
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


def by_process(gpus: Sequence[GpuSeen]) -> dict[int, GpuUse]:
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


def _own(pid: int, gpus: Sequence[GpuSeen]) -> list[GpuSeen]:
    opened = [each for each in gpus if pid in each.processes]
    fullest = max(opened, key=lambda each: (_bytes(pid, each.processes), -len(each.processes)))
    least_bytes = _CONTEXT_SHARE * _bytes(pid, fullest.processes)
    return [
        each
        for each in opened
        if _bytes(pid, each.processes) >= least_bytes
        and len(each.processes) <= len(fullest.processes)
    ]


def _use_of(gpus: Iterable[GpuSeen]) -> GpuUse:
    return all_of(GpuUse(each.share, each.waits) for each in gpus)


def _bytes(pid: int, processes: Mapping[int, int | None]) -> int:
    return processes[pid] or 0
