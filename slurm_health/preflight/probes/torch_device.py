# SPDX-License-Identifier: Apache-2.0
"""A device that torch computes with: which one, whether it can be used at all, what it computes.

On processors torch computes in as many threads as the worker has. On an accelerator what is timed
is told by the device's own clock, however late the host's processors come to it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from slurm_health.preflight.probes import host, nvml
from slurm_health.preflight.probes.context import Sample, Unusable, Watch
from slurm_health.preflight.probes.timing import Stopwatch

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
_LARGEST, _TILE, _SEED = 8, 128, 20
_WORD_BYTES = 8
# Odd, so that the products of all numbers below 2^64 differ: Knuth's for multiplicative hashing.
_FACTOR = 0x1E3779B97F4A7C15


class TorchDevice:
    """As `context.Device` says; `threads` are those of a worker on CPUs."""

    def __init__(self, raw: torch.device, threads: int = 1) -> None:
        self.raw = raw
        self.on_cuda = raw.type == "cuda"
        self.torch = str(torch.__version__)
        self.name = f"device {raw.index}" if self.on_cuda else "the processors"
        self.backend = "nccl" if self.on_cuda else "gloo"
        self._threads = threads

    def facts(self) -> dict[str, Any]:
        """Return what the event `ready` says of a worker with it.

        How fast it multiplies and copies is measured in milliseconds, before clocks have risen: it
        only tells small devices from large ones. 0, 0 of a CPU.

        Raises:
            Unusable: the device failed.
            SystemExit: the device cannot be used for another reason.
        """
        raw, gflop_per_s, memory_gb_per_s = self.raw, 0.0, 0.0
        if self.on_cuda:
            try:
                gflop_per_s, memory_gb_per_s = self.speeds()
            except RuntimeError as err:
                raise _refused(raw.index, err) from err
        return {
            "torch": self.torch,
            "backend": self.backend,
            "device": _identity(raw),
            "model": torch.cuda.get_device_name(raw) if self.on_cuda else host.model(self._threads),
            "free_bytes": self.free_bytes(),
            "gflop_per_s": round(gflop_per_s, 3),
            "memory_gb_per_s": round(memory_gb_per_s, 3),
            "collective_library": collective_library(raw),
            "ports_gbit_per_s": host.ports_gbit_per_s(os.environ) if self.on_cuda else [],
            # The first speaks for the node, and no other has to ask the driver.
            "nvlink_domain": nvlink_domain(raw) if raw.index == 0 else "",
        }

    def speeds(self) -> tuple[float, float]:
        """Return how fast an accelerator multiplies (GFLOP/s) and moves memory (GB/s)."""
        for size in (_FIRST_SIZE, _FAST_SIZE):
            ones = torch.ones(size, size, device=self.raw, dtype=half_precision(self.raw))
            product_s = self._least_s(torch.mm, ones, ones)
            if product_s > _FAST_S:
                break
        for copied in (_FIRST_COPY_BYTES, min(_FAST_COPY_BYTES, self.free_bytes() // 4)):
            source = torch.zeros(copied, device=self.raw, dtype=torch.uint8)
            copy_s = self._least_s(torch.empty_like(source).copy_, source)
            if copy_s > _FAST_S:
                break
        return 2.0 * size**3 / product_s / 1e9, 2.0 * copied / copy_s / 1e9

    def _least_s(self, work: Callable[..., object], *arguments: torch.Tensor) -> float:
        """Return the least time of several, after one that does not count."""
        times_s = []
        for _ in range(_REPEATS + 1):
            self.synchronize()
            begun_s = time.perf_counter()
            work(*arguments)
            self.synchronize()
            times_s.append(time.perf_counter() - begun_s)
        return max(min(times_s[1:]), 1e-9)

    def product(self, size: int, *, exact: bool) -> _Product:
        """Make two matrices: of integers, whose product is known, or of random numbers."""
        return _Product(self.raw, size, exact=exact)

    def memory(self) -> Iterator[str]:
        """Yield one memory: the device's, or all of the processors'."""
        if self.on_cuda:
            torch.cuda.empty_cache()
        yield ""
        if self.on_cuda:
            torch.cuda.empty_cache()

    def words(self, size_bytes: int) -> torch.Tensor:
        """Return an array of 64-bit integers that holds nothing yet."""
        return torch.empty(size_bytes // _WORD_BYTES, dtype=torch.int64, device=self.raw)

    def fill(self, words: torch.Tensor, value: int) -> torch.Tensor:
        """Write one integer to each word; return the array."""
        return words.fill_(value)

    def number(self, words: torch.Tensor, first: int, step: int) -> torch.Tensor:
        """Write `first` to the first word, and to each one `step` more; return the array."""
        torch.arange(first, first + words.numel() * step, step, out=words)
        return words

    def payload(self, size_bytes: int, rank: int) -> torch.Tensor:
        """Return what a rank sends: no two words are alike, and every rank knows that of others."""
        words = torch.arange(1, size_bytes // _WORD_BYTES + 1, device=self.raw)
        return words.mul_(_FACTOR).add_(rank)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy an array."""
        target.copy_(source, non_blocking=True)

    def difference(self, words: torch.Tensor, expected: torch.Tensor | int) -> tuple[int, int, int]:
        """Return how many words differ from others, or a value; the first one's place, and it."""
        wrong = words != expected
        count = int(wrong.sum().item())
        place = int(wrong.nonzero()[0].item()) if count else 0
        return count, place, int(words[place].item()) % (1 << 64)

    def watch(self) -> Watch:
        """Return what times this device."""
        return _Events() if self.on_cuda else Stopwatch()

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.on_cuda:
            torch.cuda.synchronize(self.raw)

    def free_bytes(self) -> int:
        """Return how much of its memory is free, a CPU's is its machine's; 0 if unknown."""
        return memory_bytes(self.raw)[0]

    def is_out_of_memory(self, err: BaseException) -> bool:
        """Tell an error that says there is no memory from all others."""
        return is_out_of_memory(err)

    def users(self) -> str:
        """Return which other processes use it."""
        return _users(self.raw.index) if self.on_cuda else ""


class _Product:
    """As `context.Product` says.

    Every value of an exact one is a sum of integers of at most 64 in magnitude. That is below 2^24
    for any size used here, so single precision holds every partial sum exactly, and the result does
    not depend on the order of the additions: any kernel of any device must give the same bits. The
    matrices are tiled from small ones, so that the expected result is computed on the host, exactly
    and at once, while the device has to calculate every value.
    """

    def __init__(self, device: torch.device, size: int, *, exact: bool) -> None:
        self._size = size
        dtype = torch.float32 if device.type == "cpu" else half_precision(device)
        if exact:
            dtype = torch.float32 if dtype is torch.float16 else dtype  # that cannot hold the sums
            tiles = size // _TILE
            generator = torch.Generator().manual_seed(_SEED)
            left, right = (
                torch.randint(-_LARGEST, _LARGEST + 1, (_TILE, _TILE), generator=generator)
                for _ in range(2)
            )
            expected = (left.double() @ right.double()) * tiles
            self._expected = expected.to(dtype).to(device)[None, :, None, :]
            # Every sum is kept in single precision, and every product is exact.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_tf32 = False
            self._left, self._right = (
                block.to(dtype).to(device).repeat(tiles, tiles) for block in (left, right)
            )
        else:
            # Zeros draw less power, and overstate the rate of a GPU by 15 %.
            self._left, self._right = (
                torch.randn(size, size, device=device).to(dtype) for _ in range(2)
            )
        self._out = torch.empty(size, size, dtype=dtype, device=device)

    def multiply(self, times: int = 1) -> None:
        """Multiply so often."""
        for _ in range(times):
            torch.mm(self._left, self._right, out=self._out)

    def wrong(self) -> int:
        """Return how many values of the last result are not exact."""
        tiles = self._size // _TILE
        tiled = self._out.view(tiles, _TILE, tiles, _TILE)
        return int((tiled != self._expected).sum().item())

    def values(self) -> int:
        """Return how many values one multiplication calculates."""
        return self._size**2


class _Events:
    """Times windows by the device's own clock."""

    def __init__(self) -> None:
        self._windows: list[tuple[Any, Any, int]] = []
        self._begin: Any = None

    def begin(self) -> None:
        """Start a window."""
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def end(self, iterations: int) -> None:
        """End a window with so many iterations."""
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._windows.append((self._begin, end, iterations))

    def sample(self) -> Sample:
        """Return the milliseconds of each window per iteration."""
        times_ms = []
        for begin, end, count in self._windows:
            end.synchronize()
            times_ms.append(float(begin.elapsed_time(end)) / count)
        return Sample(times_ms)


def claim(
    local_rank: int, *, expected: int, environ: Mapping[str, str], threads: int = 1
) -> TorchDevice:
    """Return the device of a worker, made current, after a first product on it.

    Args:
        local_rank: number of the worker on its node.
        expected: how many accelerators this process may use by its environment, 0 on a CPU node.
        environ: the environment, in which Slurm says how many it gave the job here.
        threads: of a worker on CPUs.

    Raises:
        Unusable: the device or the driver failed, or there are fewer devices than Slurm gave.
        SystemExit: the device cannot be used for another reason.
    """
    torch.set_num_threads(threads)
    if expected == 0:
        return TorchDevice(torch.device("cpu"), threads)
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if any(part.strip().startswith("MIG-") for part in visible):
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


def _opened(local_rank: int) -> TorchDevice:
    """Return the device with its context and its matrix library loaded, and one product done."""
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    if " MIG " in torch.cuda.get_device_name(device):
        raise SystemExit(_PART_OF_A_DEVICE)
    ones = torch.ones(_FIRST_SIZE, _FIRST_SIZE, device=device, dtype=half_precision(device))
    value = float(torch.mm(ones, ones)[0, 0].item())
    if value != _FIRST_SIZE:
        raise RuntimeError(f"a sum of {_FIRST_SIZE} ones is {value:g}")
    return TorchDevice(device)


def _refused(local_rank: int, err: RuntimeError) -> Unusable | SystemExit:
    """Return what a device's error means: that it is at fault, or only of no use to us."""
    first_line, *_ = str(err).strip().split("\n")
    if is_out_of_memory(err) or any(text in str(err) for text in _NOT_THE_DEVICE):
        head, end, _ = first_line.partition(_FREE)
        return SystemExit(f"device {local_rank}{_users(local_rank)}: {head}{end}")
    return Unusable(f"device {local_rank}: {first_line}")


def _users(local_rank: int) -> str:
    """Return which other processes use a device, empty where none is known of."""
    try:
        uuid = getattr(torch.cuda.get_device_properties(local_rank), "uuid", "")
    except (RuntimeError, AssertionError):  # torch asserts that there is such a device
        return ""
    others = nvml.others_on(f"GPU-{uuid}") if uuid else []
    return f" (used by {nvml.named(others)})" if others else ""


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


def _is_amd() -> bool:
    return getattr(torch.version, "hip", None) is not None


def _identity(device: torch.device) -> str:
    """Return what identifies the device: its model, its own identifier, and its PCI address."""
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", "")
    known_as = f"GPU-{uuid}" if uuid and not _is_amd() else str(uuid)
    # Since torch 2.9; as /sys and the kernel's log write it.
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, slot = (number if isinstance(number, int) else -1 for number in numbers)
    at = f"at {domain:04x}:{bus:02x}:{slot:02x}.0" if min(domain, bus, slot) >= 0 else ""
    return " ".join(word for word in (properties.name, known_as, at) if word)


def nvlink_domain(device: torch.device) -> str:
    """Return the domain of nodes whose NVIDIA devices share NVLink, nothing where that is one."""
    if device.type != "cuda" or _is_amd():
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
    """Return the library that exchanges data, with its version where it has one.

    NCCL's is that of the one which this process has loaded: it need not be the one that torch was
    built with, which is all that torch tells.
    """
    if device.type != "cuda":
        return "gloo"
    name, library = ("rccl", "librccl.so.1") if _is_amd() else ("nccl", "libnccl.so.2")
    code = ctypes.c_int()
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError):  # it is a part of torch
        version = torch.cuda.nccl.version()
    else:
        # 22907 is 2.29.7, and 2804 of before NCCL 2.9 is 2.8.4.
        major = 10_000 if code.value >= 10_000 else 1_000
        version = (code.value // major, code.value % major // 100, code.value % 100)
    return f"{name} " + ".".join(str(part) for part in version)


def half_precision(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the device computes with it, else float16."""
    if _is_amd() or torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY:
        return torch.bfloat16
    return torch.float16


def is_out_of_memory(err: BaseException) -> bool:
    """Tell an error that says there is no memory from all others."""
    if isinstance(err, (OutOfMemory, MemoryError)):
        return True
    return isinstance(err, RuntimeError) and any(text in str(err) for text in _NO_MEMORY)
