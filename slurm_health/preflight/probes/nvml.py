# SPDX-License-Identifier: Apache-2.0
"""The driver's own library, asked about one device: torch's interpreter need not have a binding.

Functions, structures and codes are those of nvml.h. A driver may hang in any call, so it is asked
in a thread that nobody waits for longer than `ASK_S`.

Who uses a device is asked here, too, and named as people know them.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ASK_S = 3.0
_FABRIC_COMPLETED = 3

Question = Callable[[ctypes.CDLL, ctypes.c_void_p], Any]
# More processes than any GPU serves at once; a driver that has more says nothing.
_MOST = 64
_PROC = Path("/proc")


class _FabricInfo(ctypes.Structure):
    """`nvmlGpuFabricInfo_v2_t`."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    )


def answer(device: str, question: Question) -> Any:
    """Return what a question about a device gives, None where the driver does not tell in time.

    Args:
        device: what identifies it, as `GPU-…`.
        question: is given the library and its handle of the device.
    """
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(_asked(device, question)), daemon=True)
    asking.start()
    asking.join(ASK_S)
    return answers[0] if answers else None


def _asked(device: str, question: Question) -> Any:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(
            device.encode(), ctypes.byref(handle)
        ):
            return None
        return question(nvml, handle)
    except (OSError, AttributeError):  # there is none, or an older one
        return None


def nvlink_domain(device: str) -> str:
    """Return the NVLink domain of a device where it reaches over several nodes, else nothing.

    That is a cluster, which one rack of GB200 is, and a clique in it. A node whose NVLinks end in
    itself has a cluster of number 0.
    """
    return str(answer(device, _domain) or "")


def _domain(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> str:
    info = _FabricInfo(version=ctypes.sizeof(_FabricInfo) | 2 << 24)
    if nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info)):
        return ""
    cluster = bytes(info.cluster)
    if info.state != _FABRIC_COMPLETED or info.status or not any(cluster):
        return ""
    return f"nvlink-{uuid.UUID(bytes=cluster)}.{info.clique}"


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
    users: list[int] = answer(uuid, _users) or []
    return sorted(pid for pid in set(users) if pid != os.getpid() and _parent(pid) != os.getppid())


def _users(library: ctypes.CDLL, handle: ctypes.c_void_p) -> list[int]:
    count, processes = ctypes.c_uint(_MOST), (_Process * _MOST)()
    if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes):
        return []
    return [int(process.pid) for process in processes[: count.value]]


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
