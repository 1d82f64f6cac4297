# SPDX-License-Identifier: Apache-2.0
"""What the GPUs of this node's processes do, as NVML tells it; asked while a training stands still.

The driver may hang, so a child asks it, for a second and a half at most three.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.training.diagnosis.rank_now import GpuSample, GpuSeen, GpuUse, by_process

if TYPE_CHECKING:
    from slurm_health.system import nvml as driver

_DRIVER_S = 3.0
_DRIVER = Path("/dev/nvidiactl")
_SAMPLES, _BETWEEN_S = 5, 0.25  # the driver makes a new one up to six times a second


class Activity(msgspec.Struct, frozen=True):
    """What the GPUs of processes did of late, by process; why nothing is known of some."""

    by_pid: dict[int, GpuUse] = {}
    why_not: str = ""


class _Answer(msgspec.Struct, frozen=True):
    gpus: tuple[GpuSeen, ...] = ()
    why_not: str = ""


def activity(*, driver: Path = _DRIVER, read: Callable[[], bytes] | None = None) -> Activity:
    """Return what processes' GPUs do. The driver may hang, so a child asks it."""
    if not driver.exists():
        return Activity(why_not="no NVIDIA GPU on this node")
    # Not before there is a GPU: it brings a megabyte.
    from slurm_health.system import killable

    answer = killable.run_one(read or _read, _DRIVER_S)
    if isinstance(answer, killable.Hung):
        return Activity(why_not=f"the driver did not answer within {answer.limit_s:g} s")
    if isinstance(answer, killable.Broke):
        return Activity(why_not=answer.reason)
    said = from_json(answer.data, _Answer)
    found = by_process(said.gpus)
    none = "" if found else "NVML shows this step no process on a GPU"
    return Activity(found, said.why_not or none)


def _read() -> bytes:
    from slurm_health.records.errors import Unmeasured
    from slurm_health.system import nvml as driver

    try:
        nvml = driver.start()
    except (Unmeasured, driver.DriverBroken) as err:
        return msgspec.json.encode(_Answer(why_not=str(err)))
    silent: dict[str, None] = {}
    found: list[GpuSeen] = []
    try:
        devices = [_Device(nvml, index) for index in range(int(nvml.nvmlDeviceGetCount()))]
        for moment in range(_SAMPLES):
            time.sleep(_BETWEEN_S if moment else 0.0)
            for each in devices:
                each.sample()
        found = [each.seen() for each in devices if not each.lost]
        silent = dict.fromkeys(each.why_not for each in devices if each.why_not)
    except nvml.NVMLError as err:
        silent[f"NVML: {err}"] = None
    return msgspec.json.encode(_Answer(tuple(found), "; ".join(silent)))


class _Device:
    """One GPU that is asked again and again, until it is lost."""

    def __init__(self, nvml: Any, index: int) -> None:
        from slurm_health.system import nvml as doors

        self._nvml, self._index = nvml, index
        self._lost_error = doors.Lost
        self._questions: driver.Questions = doors.Questions(nvml)
        self._handle: Any = None
        self._samples: list[GpuSample] = []
        self._processes: dict[int, int | None] = {}
        self._limit_w: float | None = None
        self.lost = ""
        self._within(self._open)

    @property
    def why_not(self) -> str:
        """Why not all of it is known."""
        if self.lost:
            return f"GPU {self._index} is lost: {self.lost}"
        unanswered = self._questions.unanswered
        return f"GPU {self._index} cannot be asked: {unanswered}" if unanswered else ""

    def sample(self) -> None:
        """Ask what it does now."""
        if self._handle is not None and not self.lost:
            self._within(self._sample)

    def seen(self) -> GpuSeen:
        """Return all that it said."""
        processes = self._processes if self._samples else {}
        return GpuSeen(processes=processes, samples=tuple(self._samples), limit_w=self._limit_w)

    def _within(self, ask: Callable[[], None]) -> None:
        try:
            ask()
        except self._lost_error as err:
            self.lost = str(err)

    def _open(self) -> None:
        nvml, told = self._nvml, self._questions.told
        self._handle = self._questions.handle(self._index)
        if self._handle is None:
            return
        running = told(nvml.nvmlDeviceGetComputeRunningProcesses, self._handle) or []
        self._processes = {int(each.pid): each.usedGpuMemory for each in running}
        self._limit_w = _watts(told(nvml.nvmlDeviceGetEnforcedPowerLimit, self._handle))

    def _sample(self) -> None:
        nvml, told = self._nvml, self._questions.told
        used = told(nvml.nvmlDeviceGetUtilizationRates, self._handle)
        if used is None:
            return
        self._samples.append(
            GpuSample(
                int(used.gpu) / 100,
                int(used.memory) / 100,
                _watts(told(nvml.nvmlDeviceGetPowerUsage, self._handle)),
            )
        )


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3
