# SPDX-License-Identifier: Apache-2.0
"""What NVML says of the GPUs, with "it does not say" kept apart from every value.

The binding (nvidia-ml-py) comes with the extras gpu and probes. It is loaded in the check's own
child, as the driver may hang in any call.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from slurm_health.records.errors import Unmeasured

_T = TypeVar("_T")
_Told = Callable[..., Any]
# Codes of nvml.h.
_DRIVER_NOT_LOADED = 9
_VERSION_MISMATCH = 18
_LOST = frozenset({15, 16, 28})  # GPU is lost, reset required, GPU not found
# Why a GPU may have no answer that says nothing of its health: not supported, no permission, no
# such link or value, a function that this driver lacks, and the like.
_SILENT = frozenset({2, 3, 4, 6, 13, 21, 22, 24, 25, 26, 27})
# A GPU without power or interrupts, and the "Unknown Error" of one that has left the bus: these
# are told of the GPU itself only where NVML is asked for its handle.
_UNKNOWN = 999
_NO_HANDLE = frozenset({8, 11, _UNKNOWN})
UNCORRECTED, VOLATILE = 1, 0
_FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}


class GpuDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. None: this GPU, driver or library does not tell.

    `lost` is how NVML puts that the GPU has gone; `unanswered` what it said where it could not
    answer, without saying that the GPU has gone; `silent` that it said *Unknown Error* to every
    question.
    """

    index: int
    uuid: str = ""
    bus: str = ""
    lost: str = ""
    unanswered: str = ""
    silent: bool = False
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
    processes: tuple[int, ...] | None = None
    # Divided into instances, each with a number of its own for Slurm.
    mig: bool | None = None


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """Every GPU, or what keeps the driver as a whole from working."""

    driver: str = ""
    broken: str = ""
    devices: tuple[GpuDevice, ...] = ()


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
        driver = Questions(nvml).told(nvml.nvmlSystemGetDriverVersion)
        devices = tuple(_device(nvml, index) for index in range(count))
    except nvml.NVMLError as err:
        raise Unmeasured(f"NVML: {err}") from err
    return Gpus(driver=driver or "", devices=devices)


class Questions:
    """What one GPU is asked; keeps how often it answered with an error."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._asked = 0
        self._unknown = 0
        self._errors: Counter[str] = Counter()

    @property
    def unanswered(self) -> str:
        """The errors that stood for answers, and how many they were; empty where there are none."""
        count = sum(self._errors.values())
        said = ", ".join(self._errors)
        return f"{said} ({count} of {self._asked} questions)" if count else ""

    @property
    def silent(self) -> bool:
        """Whether the GPU gave a handle, and *Unknown Error* to everything asked after it."""
        return 1 < self._asked == self._unknown + 1

    def told(self, ask: Callable[..., _T], *arguments: Any) -> _T | None:
        """Return what a call says, None where it says nothing, or an error.

        Raises:
            Lost: the GPU has gone.
        """
        self._asked += 1
        try:
            return ask(*arguments)
        except self._nvml.NVMLError as err:
            code = getattr(err, "value", 0)
            if code in _LOST:
                raise Lost(str(err)) from err
            if code not in _SILENT:
                self._errors[str(err)] += 1
                self._unknown += code == _UNKNOWN
            return None

    def handle(self, index: int) -> Any:
        """Return the handle of a GPU, None for one that the caller may not use.

        Raises:
            Lost: the GPU has gone.
        """
        self._asked += 1
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError as err:
            code = getattr(err, "value", 0)
            if code in _LOST:
                raise Lost(str(err)) from err
            if code in _NO_HANDLE:
                raise Lost(f"NVML gives no handle to it: {err}") from err
            self._errors[str(err)] += 1
            return None


def _device(nvml: Any, index: int) -> GpuDevice:
    device = GpuDevice(index=index)
    questions = Questions(nvml)
    try:
        handle = questions.handle(index)
        if handle is not None:
            device = _identity(nvml, questions.told, handle, device)
            device = _health(nvml, questions.told, handle, device)
            device = _links(nvml, questions.told, handle, device)
    except Lost as err:
        return msgspec.structs.replace(device, lost=str(err))
    said = questions.unanswered
    return msgspec.structs.replace(device, unanswered=said, silent=questions.silent)


def _identity(nvml: Any, told: _Told, handle: Any, device: GpuDevice) -> GpuDevice:
    pci = told(nvml.nvmlDeviceGetPciInfo, handle)
    running = told(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    mig = told(nvml.nvmlDeviceGetMigMode, handle)
    return msgspec.structs.replace(
        device,
        uuid=told(nvml.nvmlDeviceGetUUID, handle) or "",
        bus=as_text(pci.busId) if pci is not None else "",
        processes=tuple(int(each.pid) for each in running) if running is not None else None,
        mig=bool(mig[0]) if mig is not None else None,
    )


def as_text(value: str | bytes) -> str:
    """Return what older bindings give as bytes, and newer ones as text."""
    return value if isinstance(value, str) else value.decode(errors="replace")


def _health(nvml: Any, told: _Told, handle: Any, device: GpuDevice) -> GpuDevice:
    remapped = told(nvml.nvmlDeviceGetRemappedRows, handle)
    return msgspec.structs.replace(
        device,
        recovery_action=_field(nvml, told, handle, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
        uncorrected=told(nvml.nvmlDeviceGetTotalEccErrors, handle, UNCORRECTED, VOLATILE),
        remap_pending=bool(remapped[2]) if remapped is not None else None,
        remap_failed=bool(remapped[3]) if remapped is not None else None,
        clock_reasons=told(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
    )


def _links(nvml: Any, told: _Told, handle: Any, device: GpuDevice) -> GpuDevice:
    states = {}
    for link in range(int(nvml.NVML_NVLINK_MAX_LINKS)):
        state = told(nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break  # the GPU has no more
        states[link] = bool(state)
    fabric = _fabric(nvml, told, handle)
    return msgspec.structs.replace(
        device,
        links_active=sum(states.values()) if states else None,
        links_down=tuple(link for link, up in states.items() if not up),
        pcie_width=told(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_max_width=told(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        pcie_generation=told(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        fabric_state=_FABRIC_STATES.get(int(fabric.state), "") if fabric is not None else "",
        fabric_status=int(fabric.status) if fabric is not None else None,
    )


def _fabric(nvml: Any, told: _Told, handle: Any) -> Any:
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    asked = told(nvml.nvmlDeviceGetGpuFabricInfoV, handle, nvml.byref(info))
    return info if asked is not None else None


def _field(nvml: Any, told: _Told, handle: Any, number: int) -> int | None:
    values = told(nvml.nvmlDeviceGetFieldValues, handle, [number])
    if values is None or values[0].nvmlReturn != 0:
        return None
    return int(values[0].value.uiVal)
