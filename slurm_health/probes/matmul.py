# SPDX-License-Identifier: Apache-2.0
"""How fast one device multiplies matrices."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

# A window must span several periods of a CPU quota (100 ms on Linux), or a starved CPU looks
# healthy between two throttles; on a GPU it must outlast clock jitter.
CPU_WINDOW_S = 0.1
CPU_WINDOWS = 3
CPU_SIZE = 512
CUDA_WINDOW_S = 0.25
CUDA_WINDOWS = 4
CUDA_WARM_UP_S = 0.5
CUDA_SIZE = 8192


@dataclass(frozen=True)
class MatmulSample:
    """Mean milliseconds per multiplication, one value per timed window, and its work."""

    iteration_ms: list[float]
    flop: float


def measure(device: torch.device) -> MatmulSample:
    """Multiply random square matrices for a few windows of time.

    Random numbers, because zeros draw less power and overstate the rate of a GPU by 15 %.
    """
    if device.type == "cuda":
        return _measure_cuda(device)
    return _measure_cpu()


def _measure_cpu() -> MatmulSample:
    left = torch.randn(CPU_SIZE, CPU_SIZE)
    right = torch.randn(CPU_SIZE, CPU_SIZE)
    out = torch.empty(CPU_SIZE, CPU_SIZE)
    torch.mm(left, right, out=out)
    windows = []
    for _ in range(CPU_WINDOWS):
        count = 0
        start = time.perf_counter()
        elapsed_s = 0.0
        while elapsed_s < CPU_WINDOW_S:
            torch.mm(left, right, out=out)
            count += 1
            elapsed_s = time.perf_counter() - start
        windows.append(elapsed_s * 1e3 / count)
    return MatmulSample(iteration_ms=windows, flop=2.0 * CPU_SIZE**3)


def _measure_cuda(device: torch.device) -> MatmulSample:
    left = torch.randn(CUDA_SIZE, CUDA_SIZE, device=device).to(torch.bfloat16)
    right = torch.randn(CUDA_SIZE, CUDA_SIZE, device=device).to(torch.bfloat16)
    out = torch.empty(CUDA_SIZE, CUDA_SIZE, dtype=torch.bfloat16, device=device)
    per_window = max(1, int(CUDA_WINDOW_S * 1e3 / _warm_up_ms(left, right, out)))
    windows = [_timed_ms(left, right, out, per_window) / per_window for _ in range(CUDA_WINDOWS)]
    return MatmulSample(iteration_ms=windows, flop=2.0 * CUDA_SIZE**3)


def _warm_up_ms(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    """Run until clocks and caches have settled; return milliseconds per multiplication."""
    end = time.perf_counter() + CUDA_WARM_UP_S
    elapsed_ms = _timed_ms(left, right, out, 5) / 5
    while time.perf_counter() < end:
        elapsed_ms = _timed_ms(left, right, out, 5) / 5
    return elapsed_ms


def _timed_ms(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, count: int) -> float:
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        torch.mm(left, right, out=out)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
