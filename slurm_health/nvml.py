# SPDX-License-Identifier: Apache-2.0
"""What NVML says of the GPUs, with "it does not say" kept apart from every value.

The binding (nvidia-ml-py) comes with the extras gpu and probes. It is loaded in the check's own
child, as the driver may hang in any call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from slurm_health.core.node.finding import Unmeasured

_T = TypeVar("_T")
# Codes of nvml.h.
_DRIVER_NOT_LOADED = 9
_LOST = (15, 16, 28)  # GPU is lost, reset required, GPU not found
_VERSION_MISMATCH = 18
UNCORRECTED, VOLATILE = 1, 0
_FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. None: this GPU, driver or library does not tell."""

    index: int
    uuid: str = ""
    bus: str = ""
    lost: str = ""
    recovery_action: int | None = None
    uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    clock_reasons: int | None = None
    links_active: int | None = None
    links_down: tuple[int, ...] = ()
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_generation: int | None = None
    fabric_state: str = ""
    fabric_status: int | None = None
    processes: tuple[int, ...] = ()
    # Divided into instances, each with a number of its own for Slurm.
    mig: bool | None = None


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """Every GPU, or what keeps the driver as a whole from working."""

    driver: str = ""
    broken: str = ""
    devices: tuple[Device, ...] = ()


class DriverBroken(Exception):
    """The driver as a whole does not work; the text says what is wrong with it."""


class Lost(Exception):
    """A GPU has gone; the text says how NVML puts it."""


def start() -> Any:
    """Load the binding and start NVML; return the binding.

    Raises:
        Unmeasured: the binding or the library is not installed, or NVML does not start for a
            reason that says nothing about the node.
        DriverBroken: the driver does not work.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as err:
        raise Unmeasured("nvidia-ml-py is not installed (the extra gpu)") from err
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as err:
        code = getattr(err, "value", 0)
        if code == _DRIVER_NOT_LOADED:
            raise DriverBroken("the NVIDIA driver is not loaded") from err
        if code == _VERSION_MISMATCH:
            text = "the NVIDIA driver and its library are of different versions"
            raise DriverBroken(text) from err
        raise Unmeasured(f"NVML does not start: {err}") from err
    return nvml


def read_gpus() -> Gpus:
    """Ask NVML about every GPU.

    Raises:
        Unmeasured: the binding or the library is not installed, or NVML does not start for a
            reason that says nothing about the node.
    """
    try:
        nvml = start()
    except DriverBroken as err:
        return Gpus(broken=str(err))
    try:
        count = int(nvml.nvmlDeviceGetCount())
        driver = told(nvml, nvml.nvmlSystemGetDriverVersion)
        devices = tuple(_device(nvml, index) for index in range(count))
    except nvml.NVMLError as err:
        raise Unmeasured(f"NVML: {err}") from err
    return Gpus(driver=driver or "", devices=devices)


def told(nvml: Any, ask: Callable[..., _T], *arguments: Any) -> _T | None:
    """Return what a call says, None where it says nothing.

    Raises:
        Lost: the GPU has gone.
    """
    try:
        return ask(*arguments)
    except nvml.NVMLError as err:
        if getattr(err, "value", 0) in _LOST:
            raise Lost(str(err)) from err
        return None


def _device(nvml: Any, index: int) -> Device:
    device = Device(index=index)
    try:
        handle = told(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            return msgspec.structs.replace(device, lost="NVML gives no handle to it")
        device = _identity(nvml, handle, device)
        device = _health(nvml, handle, device)
        return _links(nvml, handle, device)
    except Lost as err:
        return msgspec.structs.replace(device, lost=str(err))


def _identity(nvml: Any, handle: Any, device: Device) -> Device:
    pci = told(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    running = told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    mig = told(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return msgspec.structs.replace(
        device,
        uuid=told(nvml, nvml.nvmlDeviceGetUUID, handle) or "",
        bus=as_text(pci.busId) if pci is not None else "",
        processes=tuple(int(each.pid) for each in running),
        mig=bool(mig[0]) if mig is not None else None,
    )


def as_text(value: str | bytes) -> str:
    """Return what older bindings give as bytes, and newer ones as text."""
    return value if isinstance(value, str) else value.decode(errors="replace")


def _health(nvml: Any, handle: Any, device: Device) -> Device:
    remapped = told(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    return msgspec.structs.replace(
        device,
        recovery_action=_field(nvml, handle, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
        uncorrected=told(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, UNCORRECTED, VOLATILE),
        remap_pending=bool(remapped[2]) if remapped is not None else None,
        remap_failed=bool(remapped[3]) if remapped is not None else None,
        clock_reasons=told(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
    )


def _links(nvml: Any, handle: Any, device: Device) -> Device:
    states = {}
    for link in range(int(nvml.NVML_NVLINK_MAX_LINKS)):
        state = told(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break  # the GPU has no more
        states[link] = bool(state)
    fabric = _fabric(nvml, handle)
    return msgspec.structs.replace(
        device,
        links_active=sum(states.values()) if states else None,
        links_down=tuple(link for link, up in states.items() if not up),
        pcie_width=told(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_max_width=told(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        pcie_generation=told(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        fabric_state=_FABRIC_STATES.get(int(fabric.state), "") if fabric is not None else "",
        fabric_status=int(fabric.status) if fabric is not None else None,
    )


def _fabric(nvml: Any, handle: Any) -> Any:
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    asked = told(nvml, nvml.nvmlDeviceGetGpuFabricInfoV, handle, nvml.byref(info))
    return info if asked is not None else None


def _field(nvml: Any, handle: Any, number: int) -> int | None:
    values = told(nvml, nvml.nvmlDeviceGetFieldValues, handle, [number])
    if values is None or values[0].nvmlReturn != 0:
        return None
    return int(values[0].value.uiVal)
