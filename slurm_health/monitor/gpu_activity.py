# SPDX-License-Identifier: Apache-2.0
"""Whether the GPUs of ranks compute, by NVML: a rank that waits for its own GPU uses no processor.

A collective that hangs keeps a GPU as busy as work does; that is told apart by stacks and by the
Flight Recorder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

_LIMIT_S = 3.0
_DRIVER = Path("/dev/nvidiactl")


class Activity(msgspec.Struct, frozen=True):
    """The shares of time in which GPUs computed of late, by process; why there are none."""

    by_pid: dict[int, float] = {}
    why_not: str = ""


def activity(*, driver: Path = _DRIVER, read: Callable[[], bytes] | None = None) -> Activity:
    """Return which processes' GPUs are at work. The driver may hang, so a child asks it."""
    if not driver.exists():
        return Activity(why_not="no NVIDIA GPU on this node")
    # Not before there is a GPU: it brings a megabyte.
    from slurm_health import killable

    answer = killable.run_one(read or _read, _LIMIT_S)
    if isinstance(answer, killable.Hung):
        return Activity(why_not=f"the driver did not answer within {answer.limit_s:g} s")
    if isinstance(answer, killable.Broke):
        return Activity(why_not=answer.reason)
    return msgspec.json.decode(answer.data, type=Activity)


def _read() -> bytes:
    from slurm_health import nvml as driver
    from slurm_health.core.node.finding import Unmeasured

    try:
        nvml = driver.start()
    except (Unmeasured, driver.DriverBroken) as err:
        return msgspec.json.encode(Activity(why_not=str(err)))
    found: dict[int, float] = {}
    try:
        for index in range(int(nvml.nvmlDeviceGetCount())):
            handle = driver.told(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:
                continue
            used = driver.told(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
            running = driver.told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
            if used is None:
                continue
            share = int(used.gpu) / 100
            for each in running:
                found[int(each.pid)] = max(share, found.get(int(each.pid), 0.0))
    except (nvml.NVMLError, driver.Lost) as err:
        return msgspec.json.encode(Activity(found, f"NVML: {err}"))
    why_not = "" if found else "NVML shows this step no process on a GPU"
    return msgspec.json.encode(Activity(found, why_not))
