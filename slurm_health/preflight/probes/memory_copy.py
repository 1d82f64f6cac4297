# SPDX-License-Identifier: Apache-2.0
"""How fast a device's memory is: one array copied to another, larger than any cache."""

from __future__ import annotations

import torch

from slurm_health.preflight.probes.context import ProbeContext, Sample
from slurm_health.preflight.probes.timing import each

CUDA_BYTES = 2 << 30
CPU_BYTES = 64 << 20
CUDA_ITERATIONS = 50  # and the bytes: less by the round's options where devices are small
WARM_UP_ITERATIONS = 2
# On a CPU: as many iterations as fit, so that a starved one is not kept at it for long.
CPU_BUDGET_S = 0.15
CPU_ITERATIONS = (3, 10)


def measure(context: ProbeContext) -> list[Sample]:
    """Copy, and time each iteration. It reads and writes every byte once: both are counted."""
    size = int(context.options.get("copy_bytes", CUDA_BYTES)) if context.on_cuda else CPU_BYTES
    source = torch.ones(size // 4, device=context.device)
    target = torch.empty_like(source)
    for _ in range(WARM_UP_ITERATIONS):
        target.copy_(source)
    sample = (
        Sample(_on_cuda_ms(context, target, source)) if context.on_cuda else _on_cpu(target, source)
    )
    total_bytes = 2 * source.numel() * source.element_size()
    return [sample._replace(total_bytes=total_bytes)]


def _on_cuda_ms(context: ProbeContext, target: torch.Tensor, source: torch.Tensor) -> list[float]:
    iterations = int(context.options.get("copies", CUDA_ITERATIONS))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    marks[0].record()
    for mark in marks[1:]:
        target.copy_(source)
        mark.record()
    marks[-1].synchronize()
    return [float(begin.elapsed_time(end)) for begin, end in zip(marks, marks[1:])]  # noqa: B905 RUF007 - older Pythons run this


def _on_cpu(target: torch.Tensor, source: torch.Tensor) -> Sample:
    least, most = CPU_ITERATIONS
    return each(lambda: target.copy_(source), least=least, most=most, budget_s=CPU_BUDGET_S)
