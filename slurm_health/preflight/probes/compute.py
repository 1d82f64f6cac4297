# SPDX-License-Identifier: Apache-2.0
"""How fast, and whether exactly, one device multiplies matrices.

Whether exactly is seen in products of integers, of which the result is known. Every entry is a sum
of K integers of at most 64 in magnitude. That is below 2^24 for any K used here, so single
precision holds every partial sum exactly, and the result does not depend on the order of the
additions: any kernel of any device must give the same bits. The large matrices are tiled from small
ones, so that the expected result is computed on the host, exactly and at once, while the device has
to calculate every entry.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from slurm_health.preflight.probes.context import NotMeasured, ProbeContext, Sample, WrongResults
from slurm_health.preflight.probes.device import half_precision
from slurm_health.preflight.probes.timing import windows_of

LARGEST = 8  # of the integers, in magnitude: exact in every floating-point format in use
TILE = 128
CPU_TILES = 4
CPU_PRODUCTS, CPU_HOT_PRODUCTS = 4, 1
# What the session sets in a round's options for small devices.
CUDA_SIZE = 8192
CUDA_PRODUCTS = 200
_SEED = 20


def values(context: ProbeContext) -> list[Sample]:
    """Multiply, and compare every entry of every product.

    Raises:
        WrongResults: an entry differs from the only correct value.
    """
    products = products_of(context)
    require_exact(context, products)
    return [Sample(figures={"products": products, "wrong": 0})]


def require_exact(context: ProbeContext, products: int) -> None:
    """Multiply so often, and make sure that every entry of every product is exact.

    Raises:
        WrongResults: an entry differs from the only correct value.
    """
    wrong = wrong_values(context, products)
    if wrong:
        device = f"device {context.local_rank} computes"
        who = device if context.on_cuda else "the processors compute"
        raise WrongResults(
            f"{who} wrong results: {wrong} of"
            f" {products * size_of(context) ** 2} values of an integer matrix product are not exact"
        )


def wrong_values(context: ProbeContext, products: int) -> int:
    """Return how many entries are not exact in so many products of integers."""
    tiles = size_of(context) // TILE
    generator = torch.Generator().manual_seed(_SEED)
    left, right = (
        torch.randint(-LARGEST, LARGEST + 1, (TILE, TILE), generator=generator) for _ in range(2)
    )
    dtype = _dtype(context)
    expected = ((left.double() @ right.double()) * tiles).to(dtype).to(context.device)
    big_left, big_right = (
        block.to(dtype).to(context.device).repeat(tiles, tiles) for block in (left, right)
    )
    wrong = torch.zeros((), dtype=torch.int64, device=context.device)
    _forbid_inexact_sums()
    for _ in range(products):
        product = torch.mm(big_left, big_right)
        tiled = product.view(tiles, TILE, tiles, TILE)
        wrong += (tiled != expected[None, :, None, :]).sum()
    return int(wrong.item())


def size_of(context: ProbeContext) -> int:
    """Return how many rows and columns a product has."""
    if not context.on_cuda:
        return TILE * CPU_TILES
    return int(context.options.get("matmul_size", CUDA_SIZE))


def products_of(context: ProbeContext, *, hot: bool = False) -> int:
    """Return how many products are compared.

    Half as many at the end of a burn: a fifth of a second on a current GPU, which does not cool
    down before the last of them.
    """
    if not context.on_cuda:
        return CPU_HOT_PRODUCTS if hot else CPU_PRODUCTS
    products = int(context.options.get("exact_products", CUDA_PRODUCTS))
    return products // 2 if hot else products


def _dtype(context: ProbeContext) -> torch.dtype:
    if not context.on_cuda:
        return torch.float32
    half = half_precision(context.device)
    return half if half is torch.bfloat16 else torch.float32  # float16 cannot hold the sums


def _forbid_inexact_sums() -> None:
    """Have every sum kept in single precision, and every product exact."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False


# A window must span several periods of a CPU quota (100 ms on Linux), or a starved CPU looks
# healthy between two throttles; on a GPU it must outlast clock jitter.
CPU_WINDOW_S = 0.04
CPU_WINDOWS = 5
CPU_SIZE = 512
CUDA_WINDOW_S = 0.25
CUDA_WINDOWS = 4
CUDA_WARM_UP_S = 0.5
# Until a device has reached the clock it can sustain. A burn that is no longer than that reaches it
# on its way: the median of its windows is of the later ones' clock, or of all devices' earlier one.
CUDA_BURN_WARM_UP_S = 3.0


def matmul(context: ProbeContext) -> list[Sample]:
    """Multiply random square matrices for a few windows of time.

    Random numbers, because zeros draw less power and overstate the rate of a GPU by 15 %. Each
    value is the mean of one window. The option `burn_s` sets how long an accelerator is measured
    after it has warmed up. The burn ends with products of integers: some devices calculate wrongly
    only when they are hot.

    Raises:
        WrongResults: a value of those is not exact.
    """
    size = size_of(context) if context.on_cuda else CPU_SIZE
    burn_s = float(context.options.get("burn_s", 0.0))
    sample = (
        Sample(_measure_cuda(context.device, size, burn_s)) if context.on_cuda else _measure_cpu()
    )
    if burn_s:
        require_exact(context, products_of(context, hot=True))
    return [sample._replace(flop=2.0 * size**3)]


def _measure_cpu() -> Sample:
    left = torch.randn(CPU_SIZE, CPU_SIZE)
    right = torch.randn(CPU_SIZE, CPU_SIZE)
    out = torch.empty(CPU_SIZE, CPU_SIZE)
    torch.mm(left, right, out=out)
    return windows_of(
        lambda: torch.mm(left, right, out=out), window_s=CPU_WINDOW_S, windows=CPU_WINDOWS
    )


def _measure_cuda(device: torch.device, size: int, burn_s: float) -> list[float]:
    dtype = half_precision(device)
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, dtype=dtype, device=device)
    warm_up_s = CUDA_BURN_WARM_UP_S if burn_s > CUDA_BURN_WARM_UP_S else CUDA_WARM_UP_S
    windows = max(CUDA_WINDOWS, int(burn_s / CUDA_WINDOW_S))
    return windows_ms(functools.partial(torch.mm, left, right, out=out), warm_up_s, windows)


def windows_ms(
    multiply: Callable[[], object], warm_up_s: float = CUDA_WARM_UP_S, windows: int = CUDA_WINDOWS
) -> list[float]:
    """Return milliseconds per multiplication of each window, after a warm-up, on an accelerator."""
    per_window = max(1, int(CUDA_WINDOW_S * 1e3 / _warm_up_ms(multiply, warm_up_s)))
    return [_timed_ms(multiply, per_window) / per_window for _ in range(windows)]


def _warm_up_ms(multiply: Callable[[], object], warm_up_s: float) -> float:
    """Run until clocks and caches have settled; return milliseconds per multiplication."""
    end = time.perf_counter() + warm_up_s
    elapsed_ms = _timed_ms(multiply, 5) / 5
    while time.perf_counter() < end:
        elapsed_ms = _timed_ms(multiply, 5) / 5
    return elapsed_ms


def _timed_ms(multiply: Callable[[], object], count: int) -> float:
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        multiply()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


# The oldest NVIDIA devices whose tensor cores know it: Ada and Hopper.
_CAPABILITY = (8, 9)
_FIRST_SIZE = 256
# What torch, and CUDA's matrix library, say of a device or a release that has it not.
_LACKING = ("only supported", "not supported", "NOT_SUPPORTED")


def matmul_fp8(context: ProbeContext) -> list[Sample]:
    """Multiply random square matrices for a few windows of time, after `matmul`'s own warm-up.

    Returns:
        One sample; without times where the device or torch has no such numbers: then `left_out`
        says why.

    Raises:
        NotMeasured: the worker has no accelerator.
    """
    if not context.on_cuda:
        raise NotMeasured("matmul_fp8: only accelerators multiply 8-bit numbers")
    left_out = _left_out(context.device)
    if left_out:
        return [Sample(figures={"left_out": left_out})]
    size = size_of(context)
    return [Sample(iteration_ms=windows_ms(_product(context.device, size)), flop=2.0 * size**3)]


def _left_out(device: torch.device) -> str:
    """Return why there is nothing to measure on a device, empty if there is."""
    if getattr(torch.version, "hip", None) is not None:
        return "8-bit products of AMD's GPUs have another format, and are not measured"
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no 8-bit floating-point numbers"
    if not hasattr(torch, "float8_e4m3fn") or not hasattr(torch, "_scaled_mm"):
        return f"torch {torch.__version__} does not multiply 8-bit floating-point numbers"
    try:
        _product(device, _FIRST_SIZE)()
        torch.cuda.synchronize(device)
    except (RuntimeError, TypeError) as err:  # a function of torch's own, which has changed before
        if isinstance(err, RuntimeError) and not any(text in str(err) for text in _LACKING):
            raise
        return f"torch {torch.__version__} does not multiply them: {str(err).splitlines()[0]}"
    return ""


def _product(device: torch.device, size: int) -> functools.partial[torch.Tensor]:
    """Return what multiplies two matrices of so many rows, as training with such numbers does."""
    left, right = (
        torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in ("left", "right")
    )
    scale = torch.ones((), device=device)
    return functools.partial(
        torch._scaled_mm,
        left,
        right.t(),  # column by column, as the matrix library wants it
        scale_a=scale,
        scale_b=scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
