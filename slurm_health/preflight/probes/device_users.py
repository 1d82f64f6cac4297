# SPDX-License-Identifier: Apache-2.0
"""Who uses a device, as the driver tells: asked of NVML itself, for torch need not have a binding.

Functions, structure and codes are those of nvml.h. A driver may hang in any call, so it is asked
in a thread that nobody waits for longer than `ASK_S`.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import threading
from collections.abc import Sequence
from pathlib import Path

ASK_S = 3.0
# More processes than any GPU serves at once; a driver that has more says nothing.
_MOST = 64
_PROC = Path("/proc")


class _Process(ctypes.Structure):
    """`nvmlProcessInfo_v2_t`: of version 3 of the function too."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def others_on(uuid: str) -> list[int]:
    """Return the processes that use a device, without this one and its siblings.

    Empty too where the driver does not tell, or not in time.

    Args:
        uuid: what identifies the device, as `GPU-…`.
    """
    found: list[int] = []
    asking = threading.Thread(target=lambda: found.extend(_asked(uuid)), daemon=True)
    asking.start()
    asking.join(ASK_S)
    return sorted(pid for pid in set(found) if pid != os.getpid() and _parent(pid) != os.getppid())


def _asked(uuid: str) -> list[int]:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    handle, count = ctypes.c_void_p(), ctypes.c_uint(_MOST)
    processes = (_Process * _MOST)()
    try:
        failed = (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
            or nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes)
        )
    except AttributeError:  # an older driver
        return []
    if failed:
        return []
    return [int(each.pid) for each in processes[: count.value]]


def named(pids: Sequence[int], proc: Path = _PROC) -> str:
    """Return what people know processes by: `process 4711, python of alice`."""
    return " and ".join(f"process {pid}{_known(pid, proc)}" for pid in pids)


def _known(pid: int, proc: Path) -> str:
    """Return name and user of a process, empty where it is another namespace's, or gone."""
    try:
        name = (proc / str(pid) / "comm").read_text(errors="replace").strip()
        number = (proc / str(pid)).stat().st_uid
    except OSError:
        return ""
    return f", {name} of {_user(number)}"


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _parent(pid: int, proc: Path = _PROC) -> int:
    """Return a process's parent, 0 where that is not known."""
    try:
        stat = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])
