# SPDX-License-Identifier: Apache-2.0
"""The driver's own library, asked about one device: torch's interpreter need not have a binding.

Functions, structures and codes are those of nvml.h. A driver may hang in any call, so it is asked
in a thread that nobody waits for longer than `ASK_S`.
"""

from __future__ import annotations

import ctypes
import threading
import uuid
from collections.abc import Callable
from typing import Any

ASK_S = 3.0
_FABRIC_COMPLETED = 3

Question = Callable[[ctypes.CDLL, ctypes.c_void_p], Any]


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
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(_asked(device, question)), daemon=True)
    asking.start()
    asking.join(ASK_S)
    return found[0] if found else None


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
