# SPDX-License-Identifier: Apache-2.0
"""Who uses a device, as the driver tells, and by which names people know them."""

from __future__ import annotations

import ctypes
import os
import pwd
from collections.abc import Sequence
from pathlib import Path

from slurm_health.preflight.probes import nvml

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
    found: list[int] = nvml.answer(uuid, _users) or []
    return sorted(pid for pid in set(found) if pid != os.getpid() and _parent(pid) != os.getppid())


def _users(library: ctypes.CDLL, handle: ctypes.c_void_p) -> list[int]:
    count, processes = ctypes.c_uint(_MOST), (_Process * _MOST)()
    if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes):
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
