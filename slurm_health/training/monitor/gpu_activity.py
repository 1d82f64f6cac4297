# SPDX-License-Identifier: Apache-2.0
"""The GPU of a rank, and whether it works or only waits, by NVML.

A rank that waits for its own GPU may use no processor. A collective that waits for its peers runs a
polling kernel: NVML shows that GPU as used all the time, like one that works, but next to nothing
moves through its memory, and it draws little power. All three together, in every sample, mean a
wait. If one of them is unknown, a used GPU works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slurm_health.records.decoding import from_json

_DRIVER_S = 3.0
_DRIVER = Path("/dev/nvidiactl")
_SAMPLES, _BETWEEN_S = 5, 0.25  # the driver makes a new one up to six times a second
# A GPU waits if it is used for at least so much of the time, its memory for at most so much, and
# with at most so much of its power limit. A working one may look so briefly: all samples count.
_WAITS_USED, _WAITS_MEMORY, _WAITS_POWER = 0.9, 0.01, 0.4
_FEWEST_SAMPLES = 3
# The memory of a mere context is less than this share of a training's.
_CONTEXT_SHARE = 0.25


class GpuSample(msgspec.Struct, frozen=True, array_like=True):
    """One moment of a GPU: shares of time in which kernels ran and its memory was used; watts."""

    used: float
    memory_used: float | None = None
    power_w: float | None = None


class SampledGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU for a second or two: the bytes of its processes, and its samples.

    Bytes are None if NVML does not know them, as inside some containers. `limit_w` is its power
    limit, None if unknown.
    """

    processes: dict[int, int | None] = {}
    samples: tuple[GpuSample, ...] = ()
    limit_w: float | None = None

    @property
    def share(self) -> float:
        """The share of time in which it was used; the highest sample counts."""
        return max((sample.used for sample in self.samples), default=0.0)

    @property
    def waits(self) -> bool:
        """Whether it was used all the time, for next to nothing."""
        limit_w = self.limit_w
        return len(self.samples) >= _FEWEST_SAMPLES and all(
            sample.memory_used is not None
            and sample.power_w is not None
            and limit_w is not None
            and sample.used >= _WAITS_USED
            and sample.memory_used <= _WAITS_MEMORY
            and sample.power_w <= _WAITS_POWER * limit_w
            for sample in self.samples
        )


class GpuUse(msgspec.Struct, frozen=True, array_like=True):
    """The activity of a process's GPUs: their share of used time, and whether they only wait."""

    share: float = 0.0
    waits: bool = False


class GpuActivity(msgspec.Struct, frozen=True):
    """The recent activity of GPUs, by process; why some of it is unknown."""

    by_pid: dict[int, GpuUse] = {}
    why_not: str = ""


def combined(uses: Iterable[GpuUse]) -> GpuUse:
    """Return the activity of several processes' GPUs, such as of a rank and its children."""
    busy = [use for use in uses if use.share]
    return GpuUse(
        share=max((use.share for use in busy), default=0.0),
        waits=bool(busy) and all(use.waits for use in busy),
    )


def by_process(gpus: Sequence[SampledGpu]) -> dict[int, GpuUse]:
    """Return the activity of processes' own GPUs.

    PyTorch's NCCL watchdog opens the first GPU of its node in every process, beside the one that
    the process trains on. That one has the most of its memory, or else the fewest processes.
    """

    def held(gpu: SampledGpu, pid: int) -> int:
        return gpu.processes[pid] or 0

    uses = {}
    for pid in dict.fromkeys(pid for gpu in gpus for pid in gpu.processes):
        opened = [gpu for gpu in gpus if pid in gpu.processes]
        fullest = max((held(gpu, pid), -len(gpu.processes)) for gpu in opened)
        own = [
            gpu
            for gpu in opened
            if held(gpu, pid) >= _CONTEXT_SHARE * fullest[0] and len(gpu.processes) <= -fullest[1]
        ]
        uses[pid] = combined(GpuUse(gpu.share, gpu.waits) for gpu in own)
    return uses


def activity(
    *, driver: Path = _DRIVER, read: Callable[[], bytes] | None = None, limit_s: float = _DRIVER_S
) -> GpuActivity:
    """Return the activity of processes' GPUs. The driver may hang, so a child asks it."""
    if not driver.exists():
        return GpuActivity()
    # It takes a megabyte, and is useless without a GPU.
    from slurm_health.system import killable

    answer = killable.run_one(read or _read, limit_s)
    if isinstance(answer, killable.Hung):
        return GpuActivity(why_not=f"the driver did not answer within {answer.limit_s:g} s")
    if isinstance(answer, killable.Broke):
        return GpuActivity(why_not=answer.reason)
    return from_json(answer.data, GpuActivity)


def _read() -> bytes:
    """In the child, sample every GPU that is visible to this process."""
    from slurm_health.records.errors import Unmeasured
    from slurm_health.system import nvml as driver

    try:
        nvml = driver.start()
    except (Unmeasured, driver.DriverBroken) as err:
        return msgspec.json.encode(GpuActivity(why_not=str(err)))
    gpus: dict[int, SampledGpu] = {}
    problems: dict[str, None] = {}
    try:
        questions = {n: driver.Questions(nvml) for n in range(int(nvml.nvmlDeviceGetCount()))}
        for moment in range(_SAMPLES):
            time.sleep(_BETWEEN_S if moment else 0.0)
            for index, asked in list(questions.items()):
                try:
                    gpus[index] = _sampled(nvml, index, asked, gpus.get(index))
                except driver.Lost as err:
                    problems[f"GPU {index} is lost: {err}"] = None
                    del questions[index]
                    gpus.pop(index, None)
        for index, asked in questions.items():
            if asked.unanswered:
                problems[f"GPU {index} does not answer: {asked.unanswered}"] = None
    except nvml.NVMLError as err:
        gpus, problems = {}, {f"NVML: {err}": None}
    uses = by_process([gpu for gpu in gpus.values() if gpu.samples])
    none = "" if uses else "NVML shows this step no process on a GPU"
    return msgspec.json.encode(GpuActivity(uses, "; ".join(problems) or none))


def _sampled(nvml: Any, index: int, asked: Any, before: SampledGpu | None) -> SampledGpu:
    """Return a GPU with one more sample.

    Raises:
        Lost: it is off the bus.
    """
    handle, ask = asked.handle(index), asked.told
    if handle is None:
        return SampledGpu()
    if before is None:
        running = ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        before = SampledGpu(
            processes={int(process.pid): process.usedGpuMemory for process in running},
            limit_w=_watts(ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        )
    used = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    if used is None:
        return before
    power_w = _watts(ask(nvml.nvmlDeviceGetPowerUsage, handle))
    sample = GpuSample(int(used.gpu) / 100, int(used.memory) / 100, power_w)
    return msgspec.structs.replace(before, samples=(*before.samples, sample))


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3
