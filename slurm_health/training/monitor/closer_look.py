# SPDX-License-Identifier: Apache-2.0
"""What is looked at only while a training stands still, beside what its ranks answer.

What their GPUs do is asked of NVML: a rank that waits for its own GPU may use no processor. Where
the main threads of ranks are that do not say so themselves, py-spy tells, where it may look. It
reads the memory of a process and stops nothing (`--nonblocking`), so a stack may be torn: what
cannot be read is asked for once more.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.text import cut, one_line
from slurm_health.training.diagnosis.rank_now import (
    GpuSample,
    GpuUse,
    RankLook,
    SampledGpu,
    all_of,
    by_process,
)
from slurm_health.training.diagnosis.seen import Frame
from slurm_health.training.monitor.ranks import Ranks

if TYPE_CHECKING:
    from slurm_health.system import nvml as driver

_ANSWER_S = 3.0
_DRIVER_S = 3.0
_DRIVER = Path("/dev/nvidiactl")
_SAMPLES, _BETWEEN_S = 5, 0.25  # the driver makes a new one up to six times a second
_STACKS_S = 3.0  # of ranks that do not answer
_STACK_S = 2.0  # of one process
_TRIES = 2
_MOST_FRAMES = 40
_INSTALL = "py-spy is not installed (pip install 'slurm-health[diagnosis]')"

Processes = Mapping[tuple[str, int], Sequence[int]]


def look_closer(ranks: Ranks) -> tuple[tuple[RankLook, ...], dict[str, str]]:
    """Return all that can be seen of the ranks on this node, and why what cannot."""
    looks = ranks.look(_ANSWER_S)
    processes = ranks.processes()
    looks, why_no_stacks = with_stacks(looks, processes, _STACKS_S)
    looks, why_no_gpus = _with_gpus(looks, processes)
    reasons = {"stacks": why_no_stacks, "gpu-activity": why_no_gpus}
    return tuple(looks), {what: why for what, why in reasons.items() if why}


def with_stacks(
    looks: Sequence[RankLook], processes: Processes, wait_s: float
) -> tuple[list[RankLook], str]:
    """Return the same with the stacks of those that did not answer; why some have none."""
    pids = {
        (look.program, look.rank): processes[look.program, look.rank][0]
        for look in looks
        if not look.answered and (look.program, look.rank) in processes
    }
    if not pids:
        return list(looks), ""
    read = read_stacks(list(pids.values()), wait_s=wait_s)
    stacks = {rank: read.by_pid[pid] for rank, pid in pids.items() if pid in read.by_pid}
    return [
        msgspec.structs.replace(look, stack=stacks.get((look.program, look.rank), look.stack))
        for look in looks
    ], read.why_not


def _with_gpus(looks: Sequence[RankLook], processes: Processes) -> tuple[list[RankLook], str]:
    """Return the same with what their GPUs do; why that is not known of some."""
    seen = activity()
    found = []
    for look in looks:
        pids = processes.get((look.program, look.rank), ())
        use = all_of(seen.by_pid[pid] for pid in pids if pid in seen.by_pid)
        found.append(msgspec.structs.replace(look, gpu_share=use.share, gpu_waits=use.waits))
    return found, seen.why_not


class GpuActivity(msgspec.Struct, frozen=True):
    """What the GPUs of processes did of late, by process; why nothing is known of some."""

    by_pid: dict[int, GpuUse] = {}
    why_not: str = ""


class _Answer(msgspec.Struct, frozen=True):
    gpus: tuple[SampledGpu, ...] = ()
    why_not: str = ""


def activity(*, driver: Path = _DRIVER, read: Callable[[], bytes] | None = None) -> GpuActivity:
    """Return what processes' GPUs do. The driver may hang, so a child asks it."""
    if not driver.exists():
        return GpuActivity(why_not="no NVIDIA GPU on this node")
    # Not before there is a GPU: it brings a megabyte.
    from slurm_health.system import killable

    answer = killable.run_one(read or _read, _DRIVER_S)
    if isinstance(answer, killable.Hung):
        return GpuActivity(why_not=f"the driver did not answer within {answer.limit_s:g} s")
    if isinstance(answer, killable.Broke):
        return GpuActivity(why_not=answer.reason)
    said = from_json(answer.data, _Answer)
    found = by_process(said.gpus)
    none = "" if found else "NVML shows this step no process on a GPU"
    return GpuActivity(found, said.why_not or none)


def _read() -> bytes:
    from slurm_health.records.errors import Unmeasured
    from slurm_health.system import nvml as driver

    try:
        nvml = driver.start()
    except (Unmeasured, driver.DriverBroken) as err:
        return msgspec.json.encode(_Answer(why_not=str(err)))
    silent: dict[str, None] = {}
    found: list[SampledGpu] = []
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

    def seen(self) -> SampledGpu:
        """Return all that it said."""
        processes = self._processes if self._samples else {}
        return SampledGpu(processes=processes, samples=tuple(self._samples), limit_w=self._limit_w)

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


class _Frame(msgspec.Struct):
    filename: str
    name: str
    line: int = 0


class _Thread(msgspec.Struct):
    frames: list[_Frame] = []
    os_thread_id: int | None = None
    thread_name: str | None = None


class Stacks(msgspec.Struct, frozen=True):
    """The stacks of main threads by process, outermost call first; why others have none."""

    by_pid: dict[int, tuple[Frame, ...]] = {}
    why_not: str = ""


def find_py_spy() -> str | None:
    """Return where py-spy is: beside our own interpreter, or among the user's commands."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def read_stacks(pids: Sequence[int], *, wait_s: float, command: str | None = None) -> Stacks:
    """Return the stacks of processes, as far as they can be read within `wait_s`."""
    command = command or find_py_spy()
    if command is None:
        return Stacks(why_not=_INSTALL)
    found: dict[int, tuple[Frame, ...]] = {}
    why_not = ""
    until_s = time.monotonic() + wait_s
    for pid in pids:
        try:
            found[pid] = _stack(command, pid, until_s)
        except (OSError, ValueError) as err:
            why_not = cut(one_line(str(err) or "py-spy did not answer in time"), 200)
    return Stacks(found, why_not)


def _stack(command: str, pid: int, until_s: float) -> tuple[Frame, ...]:
    """Return one stack.

    Raises:
        OSError: py-spy cannot be run, or not in time.
        ValueError: it says why it cannot look.
    """
    # Not before a stack is needed: it brings a megabyte.
    from slurm_health.system.processes import run

    argv = [command, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    said = ""
    for _ in range(_TRIES):
        left_s = min(_STACK_S, until_s - time.monotonic())
        if left_s <= 0:
            raise TimeoutError
        ended = run(argv, environ=dict(os.environ), deadline_s=left_s)
        if ended.returncode == 0:
            return _main_thread(ended.stdout, pid)
        said = ended.stderr.decode(errors="replace")
        if "permission denied" in said.lower():
            raise ValueError("py-spy may not look: ptrace is not allowed here")
    raise ValueError(f"py-spy: {said}")


def _main_thread(data: bytes, pid: int) -> tuple[Frame, ...]:
    try:
        threads = from_json(data, list[_Thread])
    except msgspec.MsgspecError as err:
        raise ValueError(f"py-spy answered with something else: {err}") from err
    for each in threads:
        if each.os_thread_id == pid or each.thread_name == "MainThread":
            frames = [Frame(f.filename[-300:], f.line, f.name[:100]) for f in each.frames]
            return tuple(frames[:_MOST_FRAMES][::-1])
    raise ValueError("py-spy saw no main thread")
