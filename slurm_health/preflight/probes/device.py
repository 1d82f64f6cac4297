# SPDX-License-Identifier: Apache-2.0
"""The device of a worker: which one, what it is, and whether it can be used at all."""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Mapping

import torch

from slurm_health.preflight.probes import host, nvml
from slurm_health.preflight.probes.context import Unusable

# The oldest NVIDIA devices whose tensor cores know bfloat16.
_BF16_CAPABILITY = (8, 0)
# torch.OutOfMemoryError appeared in torch 2.5.
OutOfMemory: type[Exception] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
# What says that a device is in use, or that torch was made for others.
_NOT_THE_DEVICE = (
    "busy or unavailable",
    "driver on your system is too old",
    "driver version is insufficient",
    "no kernel image is available",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "not supported",
)
_NO_DEVICES = "GPUs are available"  # "No CUDA ..."
_NO_SUCH_DEVICE = "invalid device ordinal"
# A process sees one such part, however many it was given, and NCCL connects none of a GPU's.
_PART_OF_A_DEVICE = (
    "the job has parts of GPUs (MIG), which cannot be checked; take whole ones, or --check=off"
)
_FIRST_SIZE = 256
# A current GPU takes microseconds for the first, as for any product so small, and is timed again.
_FAST_S, _FAST_SIZE = 1e-3, 2048
_FIRST_COPY_BYTES, _FAST_COPY_BYTES = 4 << 20, 256 << 20
_REPEATS = 3
# torch's own words of its memory and how to save some follow these of the device's.
_FREE = "is free."
# What CPUs, the CUDA runtime and its matrix library say of it, as plain runtime errors.
_NO_MEMORY = ("allocate memory", "out of memory", "ALLOC_FAILED")


def claim(local_rank: int, *, expected: int, environ: Mapping[str, str]) -> torch.device:
    """Return the device of a worker, made current, after a first product on it.

    Args:
        local_rank: number of the worker on its node.
        expected: how many accelerators this process may use by its environment, 0 on a CPU node.
        environ: the environment, in which Slurm says how many it gave the job here.

    Raises:
        Unusable: the device or the driver failed, or there are fewer devices than Slurm gave.
        SystemExit: the device cannot be used for another reason.
    """
    if expected == 0:
        return torch.device("cpu")
    if any(part.strip().startswith("MIG-") for part in _visible(environ)):
        raise SystemExit(_PART_OF_A_DEVICE)
    expectation = f"{expected} accelerators were expected, but torch {torch.__version__}"
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        raise SystemExit(f"{expectation} was built for CPUs")
    try:
        usable = _usable_count()
        if usable >= expected:
            return _opened(local_rank)
    except RuntimeError as err:
        if _NO_SUCH_DEVICE not in str(err):
            raise _refused(local_rank, err) from err
        usable = local_rank  # their numbers have no gaps
    given = environ.get("SLURM_GPUS_ON_NODE", "")
    if given.isdecimal() and usable < min(int(given), expected):
        raise Unusable(
            f"Slurm gave the job {given} accelerators here, torch {torch.__version__} can use"
            f" {usable or 'none'}"
        )
    raise SystemExit(f"{expectation} can use {usable or 'none'}")


def _refused(local_rank: int, err: RuntimeError) -> Unusable | SystemExit:
    """Return what a device's error means: that it is at fault, or only of no use to us."""
    first_line, *_ = str(err).strip().split("\n")
    if is_out_of_memory(err) or any(text in str(err) for text in _NOT_THE_DEVICE):
        head, end, _ = first_line.partition(_FREE)
        return SystemExit(f"device {local_rank}{users(local_rank)}: {head}{end}")
    return Unusable(f"device {local_rank}: {first_line}")


def users(local_rank: int) -> str:
    """Return which other processes use a device, empty where none is known of."""
    try:
        uuid = getattr(torch.cuda.get_device_properties(local_rank), "uuid", "")
    except (RuntimeError, AssertionError):  # torch asserts that there is such a device
        return ""
    others = nvml.others_on(f"GPU-{uuid}") if uuid else []
    return f" (used by {nvml.named(others)})" if others else ""


def _visible(environ: Mapping[str, str]) -> list[str]:
    return environ.get("CUDA_VISIBLE_DEVICES", "").split(",")


def _usable_count() -> int:
    """Return how many devices the driver offers.

    Raises:
        RuntimeError: the driver cannot be used.
    """
    try:
        torch.cuda.init()
    except RuntimeError as err:
        if _NO_DEVICES not in str(err):
            raise
        return 0
    return int(torch.cuda.device_count())


def _opened(local_rank: int) -> torch.device:
    """Return the device with its context and its matrix library loaded, and one product done."""
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    if " MIG " in torch.cuda.get_device_name(device):
        raise SystemExit(_PART_OF_A_DEVICE)
    ones = torch.ones(_FIRST_SIZE, _FIRST_SIZE, device=device, dtype=half_precision(device))
    value = float(torch.mm(ones, ones)[0, 0].item())
    if value != _FIRST_SIZE:
        raise RuntimeError(f"a sum of {_FIRST_SIZE} ones is {value:g}")
    return device


def speeds(device: torch.device) -> tuple[float, float]:
    """Return how fast a device multiplies (GFLOP/s) and moves memory (GB/s); 0, 0 of a CPU.

    It takes milliseconds, before clocks have risen: it only tells small devices from large ones.

    Raises:
        Unusable: the device failed.
        SystemExit: the device cannot be used for another reason.
    """
    if device.type != "cuda":
        return 0.0, 0.0
    try:
        return _gflop_per_s(device), _memory_gb_per_s(device)
    except RuntimeError as err:
        raise _refused(device.index, err) from err


def _gflop_per_s(device: torch.device) -> float:
    for size in (_FIRST_SIZE, _FAST_SIZE):
        ones = torch.ones(size, size, device=device, dtype=half_precision(device))
        best_s = _least_s(device, functools.partial(torch.mm, ones, ones))
        if best_s > _FAST_S:
            break
    return 2.0 * size**3 / best_s / 1e9


def _memory_gb_per_s(device: torch.device) -> float:
    """Return how fast a copy is, which reads and writes every byte."""
    free_bytes = memory_bytes(device)[0]
    for size in (_FIRST_COPY_BYTES, min(_FAST_COPY_BYTES, free_bytes // 4)):
        source = torch.zeros(size, device=device, dtype=torch.uint8)
        best_s = _least_s(device, functools.partial(torch.empty_like(source).copy_, source))
        if best_s > _FAST_S:
            break
    return 2.0 * size / best_s / 1e9


def _least_s(device: torch.device, work: Callable[[], object]) -> float:
    """Return the least time of several, after one that does not count."""
    times_s = []
    for _ in range(_REPEATS + 1):
        torch.cuda.synchronize(device)
        begun_s = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - begun_s)
    return max(min(times_s[1:]), 1e-9)


def still_computes(device: torch.device) -> None:
    """Make sure that a device computes after something on it has failed.

    Raises:
        RuntimeError: it does not. Most errors of CUDA stay with a process until it ends.
    """
    ones = torch.ones(_FIRST_SIZE, device=device)
    value = float(ones.sum().item())
    torch.cuda.synchronize(device)
    if value != _FIRST_SIZE:
        raise RuntimeError(f"a sum of {_FIRST_SIZE} ones is {value:g}")


def backend(device: torch.device) -> str:
    """Return the library that exchanges data between such devices."""
    return "nccl" if device.type == "cuda" else "gloo"


def name(device: torch.device) -> str:
    """Return what identifies the device: its model, its own identifier, and its PCI address."""
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", "")
    is_nvidia = getattr(torch.version, "hip", None) is None
    known_as = f"GPU-{uuid}" if uuid and is_nvidia else str(uuid)
    # Since torch 2.9; as /sys and the kernel's log write it.
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, slot = (number if isinstance(number, int) else -1 for number in numbers)
    at = f"at {domain:04x}:{bus:02x}:{slot:02x}.0" if min(domain, bus, slot) >= 0 else ""
    return " ".join(word for word in (properties.name, known_as, at) if word)


def model(device: torch.device, threads: int) -> str:
    """Return what devices must share to be compared: the model, of CPUs also how many are used."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return host.model(threads)


def nvlink_domain(device: torch.device) -> str:
    """Return the domain of nodes whose NVIDIA devices share NVLink, nothing where that is one."""
    if device.type != "cuda" or getattr(torch.version, "hip", None) is not None:
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    return nvml.nvlink_domain(f"GPU-{uuid}") if uuid else ""


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the free and the total memory, a CPU's is its machine's; 0 where it cannot be told."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return int(free_bytes), int(total_bytes)
    return host.memory_bytes()


def collective_library(device: torch.device) -> str:
    """Return the library that exchanges data, with its version where it has one."""
    if device.type != "cuda":
        return "gloo"
    is_nvidia = getattr(torch.version, "hip", None) is None
    name, library = ("nccl", "libnccl.so.2") if is_nvidia else ("rccl", "librccl.so.1")
    version = _loaded_version(library) or torch.cuda.nccl.version()
    return f"{name} " + ".".join(str(part) for part in version)


def _loaded_version(library: str) -> tuple[int, ...]:
    """Return the version of NCCL that this process has loaded, empty where it is a part of torch.

    It need not be the one that torch was built with, which is all that torch tells.
    """
    code = ctypes.c_int()
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError):
        return ()
    # 22907 is 2.29.7, and 2804 of before NCCL 2.9 is 2.8.4.
    major = 10_000 if code.value >= 10_000 else 1_000
    return code.value // major, code.value % major // 100, code.value % 100


def half_precision(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the device computes with it, else float16."""
    is_amd = getattr(torch.version, "hip", None) is not None
    if is_amd or torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY:
        return torch.bfloat16
    return torch.float16


def is_out_of_memory(err: BaseException) -> bool:
    """Tell an error that says there is no memory from all others."""
    if isinstance(err, (OutOfMemory, MemoryError)):
        return True
    return isinstance(err, RuntimeError) and any(text in str(err) for text in _NO_MEMORY)
