# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's driver without torch: its devices opened, and memory copied from and to them.

Functions and codes are those of cuda.h. A driver may hang in any call, so it is asked in threads
that nobody waits for longer than he says; the interpreter runs on meanwhile.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurm_health.preflight.probes import nvml
from slurm_health.preflight.probes.context import Unusable

LIBRARY = "libcuda.so.1"
# An agent starts a worker twice, and waits for it for 20 s longer than for others. Eight GPUs whose
# driver stays initialised are open within seconds.
OPEN_S = 9.0
OUT_OF_MEMORY = 2
_NO_DEVICE = 100
# A driver without a function, a stub in its place, one that does not fit its kernel module: with
# these nothing can be measured.
_NOT_FOUND = 500
_NO_DRIVER = frozenset({_NOT_FOUND, 34, 35, 803, 804})
# Somebody else has it, or all of its memory.
_IN_USE = frozenset({OUT_OF_MEMORY, 46})
_ALREADY_ENABLED = 704
_NON_BLOCKING = 1  # a stream that does not wait for the default one
_TEXT_BYTES = 256
_PART_OF_A_DEVICE = " MIG "
_LOOK_S = 0.05  # how often is looked whether to stop
_NO_NAMES = frozenset({"", "-1", "NoDevFiles"})
_PERSISTENCE_DAEMON = Path("/run/nvidia-persistenced/socket")

HANGS = object()
"""In the place of what a call gives that has not returned in time."""


class DriverError(Exception):
    """A call of the driver failed with this code; the text is in its own words."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


class Driver:
    """The driver's library.

    Raises:
        OSError: there is none.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function.

        Raises:
            DriverError: it failed.
        """
        try:
            code = int(getattr(self._library, name)(*arguments))
        except AttributeError:
            raise DriverError(_NOT_FOUND, f"the driver has no {name}") from None
        if code:
            raise DriverError(code, f"{self._words(code)} (CUDA error {code})")

    def _words(self, code: int) -> str:
        words = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(words))
        return (words.value or b"unknown to the driver").decode(errors="replace")


class OpenedGpu:
    """A device; once it was opened it is open until this process ends.

    `name` is its model, `text` also has its own identifier and its PCI address. What fails raises
    DriverError; most errors stay: all that follows in this process fails too.
    """

    def __init__(self, driver: Driver, number: int) -> None:
        self._driver = driver
        self._device = ctypes.c_int()
        driver.call("cuDeviceGet", ctypes.byref(self._device), number)
        self.number = number
        self.name = self._told("cuDeviceGetName")
        own = ctypes.create_string_buffer(16)
        driver.call("cuDeviceGetUuid", own, self._device)
        self.uuid = f"GPU-{uuid.UUID(bytes=own.raw)}"
        self.text = f"{self.name} {self.uuid} at {self._told('cuDeviceGetPCIBusId')}"
        self._context = ctypes.c_void_p()
        self._stream = ctypes.c_void_p()

    def __str__(self) -> str:
        """Return by what people know it: `device 3 (NVIDIA H100 GPU-… at 0000:19:00.0)`."""
        return f"device {self.number} ({self.text})"

    def _told(self, question: str) -> str:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._driver.call(question, text, _TEXT_BYTES, self._device)
        return text.value.decode(errors="replace")

    def open(self) -> None:
        """Open it; this takes its driver a moment, and more where that is not initialised yet."""
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)

    def _call(self, name: str, *arguments: object) -> None:
        """Call a function for this device, whichever this thread has called one for before."""
        self._driver.call("cuCtxSetCurrent", self._context)
        self._driver.call(name, *arguments)

    def allocated(self, size: int) -> ctypes.c_void_p:
        """Return memory of the device."""
        memory = ctypes.c_void_p()
        self._call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
        return memory

    def free(self, memory: ctypes.c_void_p) -> None:
        """Give memory of the device back."""
        self._call("cuMemFree_v2", memory)

    def pinned(self, size: int) -> ctypes.c_void_p:
        """Return memory of the host that devices read and write by themselves."""
        memory = ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", ctypes.byref(memory), ctypes.c_size_t(size))
        return memory

    def unpin(self, memory: ctypes.c_void_p) -> None:
        """Give memory of the host back."""
        self._call("cuMemFreeHost", memory)

    def to_device(self, to: ctypes.c_void_p, source: ctypes.c_void_p, size: int) -> None:
        """Have it fetch data from the host."""
        self._call("cuMemcpyHtoDAsync_v2", to, source, ctypes.c_size_t(size), self._stream)

    def to_host(self, to: ctypes.c_void_p, source: ctypes.c_void_p, size: int) -> None:
        """Have it bring data to the host."""
        self._call("cuMemcpyDtoHAsync_v2", to, source, ctypes.c_size_t(size), self._stream)

    def to_peer(
        self, peer: OpenedGpu, to: ctypes.c_void_p, source: ctypes.c_void_p, size: int
    ) -> None:
        """Have it send data to another device of the node."""
        there, here = (to, peer._context), (source, self._context)
        self._call("cuMemcpyPeerAsync", *there, *here, ctypes.c_size_t(size), self._stream)

    def reach(self, peer: OpenedGpu) -> None:
        """Let it reach the memory of another device directly, where both can.

        Raises:
            DriverError: it can by what it says, and does not.
        """
        can = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(can), self._device, peer._device)
        if not can.value:
            return
        try:
            self._call("cuCtxEnablePeerAccess", peer._context, 0)
        except DriverError as err:
            if err.code != _ALREADY_ENABLED:
                raise

    def mark(self) -> ctypes.c_void_p:
        """Return a moment of the device's own clock: when it has done what it was given so far."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), 0)
        self._call("cuEventRecord", event, self._stream)
        return event

    def between_ms(self, begin: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        """Wait for the second of two moments; return how long after the first it was."""
        elapsed = ctypes.c_float()
        self._call("cuEventSynchronize", end)
        self._call("cuEventElapsedTime", ctypes.byref(elapsed), begin, end)
        for event in (begin, end):
            self._call("cuEventDestroy_v2", event)
        return float(elapsed.value)

    def wait(self) -> None:
        """Wait until it has done what it was given."""
        self._call("cuStreamSynchronize", self._stream)


def opened(environ: Mapping[str, str]) -> tuple[OpenedGpu, ...]:
    """Return the devices that a job was given, all open; none where there is no driver.

    Slurm names a job's devices in CUDA_VISIBLE_DEVICES. Where that is not set they are not the
    job's: others may be computing on them. Parts of devices (MIG) are not opened either.

    Raises:
        Unusable: one does not open, or there are fewer than Slurm gave.
        SystemExit: that cannot be told, or one is in use.
    """
    names = [each.strip() for each in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    wanted = next((place for place, name in enumerate(names) if name in _NO_NAMES), len(names))
    if not wanted or names[0].startswith("MIG-"):
        return ()
    try:
        driver = Driver()
    except OSError:
        return ()
    gpus: list[OpenedGpu] = []
    (end,) = in_threads([lambda: gpus.extend(_listed(driver))], OPEN_S)
    if end is HANGS:
        raise SystemExit(f"the driver of the GPUs has not started within {OPEN_S:.0f} s")
    if isinstance(end, DriverError):
        if end.code in _NO_DRIVER:
            return ()
        raise Unusable(f"the driver of the GPUs does not start: {end}")
    if any(_PART_OF_A_DEVICE in each.name for each in gpus):
        return ()
    if len(gpus) < wanted:
        raise _too_few(len(gpus), wanted, environ)
    _require_open(gpus[:wanted])
    return tuple(gpus[:wanted])


def _listed(driver: Driver) -> list[OpenedGpu]:
    try:
        driver.call("cuInit", 0)
    except DriverError as err:
        if err.code == _NO_DEVICE:
            return []
        raise
    count = ctypes.c_int()
    driver.call("cuDeviceGetCount", ctypes.byref(count))
    return [OpenedGpu(driver, number) for number in range(count.value)]


def _too_few(found: int, wanted: int, environ: Mapping[str, str]) -> Unusable | SystemExit:
    given = environ.get("SLURM_GPUS_ON_NODE", "")
    can = f"the driver can use {found or 'none'}"
    if given.isdecimal() and found < min(int(given), wanted):
        return Unusable(f"Slurm gave the job {given} accelerators here, {can}")
    return SystemExit(f"the job has {wanted} accelerators here, {can}")


def _require_open(gpus: Sequence[OpenedGpu]) -> None:
    """Open devices, all at the same time.

    One that hangs is at fault if others of its node do not, and its driver was initialised.
    """
    ends = in_threads([gpu.open for gpu in gpus], OPEN_S)
    failed = [(gpu, end) for gpu, end in zip(gpus, ends, strict=True) if end is not None]
    if not failed:
        return
    said = "; ".join(_refusal(gpu, end) for gpu, end in failed)
    in_use = any(isinstance(end, DriverError) and end.code in _IN_USE for _, end in failed)
    hang = sum(end is HANGS for _, end in failed)
    unknown = hang and (hang == len(gpus) or not _PERSISTENCE_DAEMON.exists())
    raise SystemExit(said) if in_use or unknown else Unusable(said)


def _refusal(gpu: OpenedGpu, end: object) -> str:
    if end is HANGS:
        return f"{gpu} has not opened within {OPEN_S:.0f} s"
    in_use = isinstance(end, DriverError) and end.code in _IN_USE
    return f"{gpu}{users(gpu) if in_use else ''} does not open: {end}"


def users(gpu: OpenedGpu) -> str:
    """Return which other processes use a device, empty where none is known of."""
    others = nvml.others_on(gpu.uuid)
    return f" (used by {nvml.named(others)})" if others else ""


def in_threads(
    work: Sequence[Callable[[], None]],
    wait_s: float = math.inf,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[object]:
    """Do several things at the same time; return how each ended: None, its error, or `HANGS`.

    Nobody waits longer than `wait_s`, nor on once he is stopped.
    """
    ends: list[object] = [HANGS] * len(work)
    left = set(range(len(work)))
    changed = threading.Condition()

    def run(place: int) -> None:
        end: object = None
        try:
            work[place]()
        except Exception as err:  # whatever it is: who asked for the work judges it
            end = err
        with changed:
            ends[place] = end
            left.discard(place)
            changed.notify()

    for place in range(len(work)):
        threading.Thread(target=run, args=(place,), daemon=True).start()
    until_s = time.monotonic() + wait_s
    with changed:
        while left and time.monotonic() < until_s and not is_stopped():
            changed.wait(_LOOK_S)
        return list(ends)
