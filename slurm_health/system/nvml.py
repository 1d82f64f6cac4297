# SPDX-License-Identifier: Apache-2.0
"""The GPUs as NVML shows them; a missing answer is kept apart from every value.

The binding (nvidia-ml-py) comes with the extras gpu and probes. It is loaded in the check's own
child, because the driver may hang in any call.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from slurm_health.records.errors import Unmeasured

_T = TypeVar("_T")
# Codes of nvml.h.
_DRIVER_NOT_LOADED = 9
_VERSION_MISMATCH = 18
_LOST = frozenset({15, 16, 28})  # GPU is lost, reset required, GPU not found
# Why a GPU may have no answer that says nothing of its health: not supported, no permission, no
# such link or value, a function that this driver lacks, and the like.
_SILENT = frozenset({2, 3, 4, 6, 13, 21, 22, 24, 25, 26, 27})
# A GPU without power or interrupts, and the "Unknown Error" of one that has left the bus: an answer
# to the request for a handle, these are about the GPU itself.
_UNKNOWN = 999
_NO_HANDLE = frozenset({8, 11, _UNKNOWN})
UNCORRECTED, VOLATILE = 1, 0
_FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}


class GpuDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. None: this GPU, driver or library does not answer.

    `lost` is NVML's error if the GPU has gone; `unanswered` are its other errors; `silent`: every
    answer was *Unknown Error*.
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
    # By process, the bytes that it holds; those that the driver does not report are left out.
    memory_of: dict[int, int] = {}
    # Divided into instances, each with a number of its own for Slurm.
    mig: bool | None = None


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """Every GPU; `broken` is why the driver as a whole does not work."""

    driver: str = ""
    broken: str = ""
    devices: tuple[GpuDevice, ...] = ()


class DriverBroken(Exception):
    """The driver as a whole does not work; the text says why."""


class Lost(Exception):
    """A GPU has gone; the text is NVML's error."""


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
    """Asks NVML about one GPU, and counts its errors."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._asked = 0
        self._unknown = 0
        self._errors: Counter[str] = Counter()

    @property
    def unanswered(self) -> str:
        """The errors instead of answers, with their number; empty without errors."""
        count = sum(self._errors.values())
        return f"{', '.join(self._errors)} ({count} of {self._asked} questions)" if count else ""

    @property
    def silent(self) -> bool:
        """Whether the GPU gave a handle, and *Unknown Error* to every question after it."""
        return 1 < self._asked == self._unknown + 1

    def told(self, ask: Callable[..., _T], *arguments: Any) -> _T | None:
        """Return the answer of a call, None without one or for an error.

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


def as_text(value: str | bytes) -> str:
    """Return an answer as text: older bindings give bytes."""
    return value if isinstance(value, str) else value.decode(errors="replace")


def _device(nvml: Any, index: int) -> GpuDevice:
    """Return one GPU; if it is lost in between, with the answers up to then."""
    device, questions = GpuDevice(index=index), Questions(nvml)
    ask = questions.told
    try:
        handle = questions.handle(index)
        if handle is not None:
            pci = ask(nvml.nvmlDeviceGetPciInfo, handle)
            running = ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
            mig = ask(nvml.nvmlDeviceGetMigMode, handle)
            device = msgspec.structs.replace(
                device,
                uuid=ask(nvml.nvmlDeviceGetUUID, handle) or "",
                bus=as_text(pci.busId) if pci is not None else "",
                processes=None if running is None else tuple(int(p.pid) for p in running),
                memory_of={
                    int(p.pid): int(p.usedGpuMemory)
                    for p in running or ()
                    if getattr(p, "usedGpuMemory", None)
                },
                mig=None if mig is None else bool(mig[0]),
            )
            remapped = ask(nvml.nvmlDeviceGetRemappedRows, handle)
            field = nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
            values = ask(nvml.nvmlDeviceGetFieldValues, handle, [field])
            known = values is not None and values[0].nvmlReturn == 0
            device = msgspec.structs.replace(
                device,
                recovery_action=int(values[0].value.uiVal) if values and known else None,
                uncorrected=ask(nvml.nvmlDeviceGetTotalEccErrors, handle, UNCORRECTED, VOLATILE),
                remap_pending=None if remapped is None else bool(remapped[2]),
                remap_failed=None if remapped is None else bool(remapped[3]),
                clock_reasons=ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle),
            )
            device = _links(nvml, questions, handle, device)
    except Lost as err:
        return msgspec.structs.replace(device, lost=str(err))
    return msgspec.structs.replace(device, unanswered=questions.unanswered, silent=questions.silent)


def _links(nvml: Any, questions: Questions, handle: Any, device: GpuDevice) -> GpuDevice:
    ask, states = questions.told, {}
    for link in range(int(nvml.NVML_NVLINK_MAX_LINKS)):
        state = ask(nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break  # the GPU has no more
        states[link] = bool(state)
    fabric = nvml.c_nvmlGpuFabricInfo_v2_t()
    answer = ask(nvml.nvmlDeviceGetGpuFabricInfoV, handle, nvml.byref(fabric))
    return msgspec.structs.replace(
        device,
        links_active=sum(states.values()) if states else None,
        links_down=tuple(link for link, up in states.items() if not up),
        pcie_width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_max_width=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        pcie_generation=ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        fabric_state="" if answer is None else _FABRIC_STATES.get(int(fabric.state), ""),
        fabric_status=None if answer is None else int(fabric.status),
    )
