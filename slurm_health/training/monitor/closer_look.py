# SPDX-License-Identifier: Apache-2.0
"""What is looked at only while a training stands still, beside what its ranks answer.

Whether their GPUs compute is asked of NVML: a rank that waits for its own GPU uses no processor. A
collective that hangs keeps a GPU as busy as work does; that is told apart by stacks and by the
Flight Recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.training.diagnosis.watched import RankLook
from slurm_health.training.monitor import py_spy
from slurm_health.training.monitor.ranks import Ranks

if TYPE_CHECKING:
    from slurm_health.system import nvml as driver

_ANSWER_S = 3.0
_STACKS_S = 3.0  # of ranks that do not answer

Processes = Mapping[tuple[str, int], Sequence[int]]
_DRIVER_S = 3.0
_DRIVER = Path("/dev/nvidiactl")


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
    read = py_spy.stacks(list(pids.values()), wait_s=wait_s)
    stacks = {rank: read.by_pid[pid] for rank, pid in pids.items() if pid in read.by_pid}
    return [
        msgspec.structs.replace(look, stack=stacks.get((look.program, look.rank), look.stack))
        for look in looks
    ], read.why_not


def _with_gpus(looks: Sequence[RankLook], processes: Processes) -> tuple[list[RankLook], str]:
    """Return the same with how busy their GPUs are; why that is not known of some."""
    seen = activity()
    found = []
    for look in looks:
        pids = processes.get((look.program, look.rank), ())
        share = max((seen.by_pid.get(pid, 0.0) for pid in pids), default=0.0)
        found.append(msgspec.structs.replace(look, gpu_share=share))
    return found, seen.why_not


class Activity(msgspec.Struct, frozen=True):
    """The shares of time in which GPUs computed of late, by process; why there are none."""

    by_pid: dict[int, float] = {}
    why_not: str = ""


def activity(*, driver: Path = _DRIVER, read: Callable[[], bytes] | None = None) -> Activity:
    """Return which processes' GPUs are at work. The driver may hang, so a child asks it."""
    if not driver.exists():
        return Activity(why_not="no NVIDIA GPU on this node")
    # Not before there is a GPU: it brings a megabyte.
    from slurm_health.system import killable

    answer = killable.run_one(read or _read, _DRIVER_S)
    if isinstance(answer, killable.Hung):
        return Activity(why_not=f"the driver did not answer within {answer.limit_s:g} s")
    if isinstance(answer, killable.Broke):
        return Activity(why_not=answer.reason)
    return from_json(answer.data, Activity)


def _read() -> bytes:
    from slurm_health.records.errors import Unmeasured
    from slurm_health.system import nvml as driver

    try:
        nvml = driver.start()
    except (Unmeasured, driver.DriverBroken) as err:
        return msgspec.json.encode(Activity(why_not=str(err)))
    found: dict[int, float] = {}
    silent: dict[str, None] = {}
    try:
        for index in range(int(nvml.nvmlDeviceGetCount())):
            questions = driver.Questions(nvml)
            try:
                used = _used(nvml, questions, index)
            except driver.Lost as err:
                silent[f"GPU {index} is lost: {err}"] = None
                continue
            for pid, share in used.items():
                found[pid] = max(share, found.get(pid, 0.0))
            if questions.unanswered:
                silent[f"GPU {index} cannot be asked: {questions.unanswered}"] = None
    except nvml.NVMLError as err:
        silent[f"NVML: {err}"] = None
    why_not = "; ".join(silent)
    if not found and not why_not:
        why_not = "NVML shows this step no process on a GPU"
    return msgspec.json.encode(Activity(found, why_not))


def _used(nvml: Any, questions: driver.Questions, index: int) -> dict[int, float]:
    """Return how much of a GPU's time was used of late, for each process that is on it.

    Raises:
        Lost: the GPU has gone.
    """
    handle = questions.handle(index)
    if handle is None:
        return {}
    used = questions.told(nvml.nvmlDeviceGetUtilizationRates, handle)
    running = questions.told(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return {} if used is None else {int(each.pid): int(used.gpu) / 100 for each in running}
