# SPDX-License-Identifier: Apache-2.0
"""A GPT trained by a pair of nodes: arithmetic, communication and both overlapped. Scope: pair.

The steps of the first flavour have as many tokens as memory allows, and DDP hides communication
behind their arithmetic. Those of the light flavour have few, so that communication shows.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurm_health.preflight.probes import device, gpt_model
from slurm_health.preflight.probes.context import NotMeasured, ProbeContext, Sample
from slurm_health.preflight.probes.gpt_model import Shape
from slurm_health.preflight.probes.timing import TimingPlan, timed

# Allocations and the choice of kernels in the first; DDP arranges its buckets anew in the second.
WARM_UP_ITERATIONS = 2
# A window of steps on a CPU spans a period of a CPU quota (100 ms on Linux), as for matmul.
CPU_WINDOW_S = 0.1
CPU_BUDGET_S = 0.3
CUDA_BUDGET_S = 1.0
MIN_WINDOWS = 3
MAX_WINDOWS = 20


@dataclass(frozen=True)
class _Flavour:
    """Quantities with this prefix are of steps of this shape and work."""

    prefix: str
    shape: Shape
    flop: float


def measure(context: ProbeContext) -> list[Sample]:
    """Train for a few steps of both flavours; the same model everywhere, by the round's options.

    Returns:
        `compute` and `light_compute`: this worker's arithmetic alone. In a group also
        `communication`: the all-reduce of as many bytes as there are gradients, which is the
        same for both flavours; `step` and `light_step`: a step under DDP.

    Raises:
        NotMeasured: the device runs out of memory, or the options name no model.
    """
    shape = gpt_model.shape_of(context.options)
    gpt_model.return_memory(context)
    free_bytes, total_bytes = device.memory_bytes(context.device)
    said = ""
    samples: list[Sample] = []
    try:
        samples = _samples(context, shape)
    except (RuntimeError, MemoryError) as err:
        if not device.is_out_of_memory(err):
            raise
        said = gpt_model.first_line(err)
    # Not before the exception is gone: it keeps the tensors of its frames alive.
    gpt_model.return_memory(context)
    if said:
        raise NotMeasured(
            f"{context.device} ran out of memory training a GPT with a batch of {shape.batch};"
            f" {free_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB were free: {said}"
        )
    return samples


def _samples(context: ProbeContext, shape: Shape) -> list[Sample]:
    flavours = _flavours(context, shape)
    model = gpt_model.build(shape, context.device)
    # Without DDP around it a model communicates nothing.
    samples = [_trained(context, model, each, "compute") for each in flavours]
    if context.world_size == 1:
        return samples
    for parameter in model.parameters():
        parameter.grad = None  # from here on gradients live in the buckets of DDP
    gradient_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    samples.append(_communication(context, gradient_bytes))
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for each in flavours:
        step = _trained(context, wrapped, each, "step")
        samples.append(step._replace(shared=True, total_bytes=gradient_bytes))
    return samples


def _flavours(context: ProbeContext, shape: Shape) -> tuple[_Flavour, _Flavour]:
    light_batch = int(context.options.get("gpt_light_batch", max(1, shape.batch // 2)))
    flop = float(context.options.get("gpt_flop", 0.0))
    return (
        _Flavour("", shape, flop),
        _Flavour("light_", replace(shape, batch=light_batch), flop * light_batch / shape.batch),
    )


def _trained(context: ProbeContext, model: nn.Module, flavour: _Flavour, quantity: str) -> Sample:
    """Time training steps of a model, bare or under DDP."""
    optimizer = gpt_model.optimizer_of(model, context.device)
    tokens = gpt_model.mock_tokens(flavour.shape, context.device)

    def step() -> None:
        gpt_model.train_step(model, optimizer, tokens, context)

    window_s = 0.0 if context.on_cuda else CPU_WINDOW_S
    sample = timed(context, step, _pace(context, window_s))
    return sample._replace(quantity=flavour.prefix + quantity, flop=flavour.flop)


def _communication(context: ProbeContext, gradient_bytes: int) -> Sample:
    # Zeros stay zeros however often they are added up, and travel no faster than other numbers.
    gradients = torch.zeros(gradient_bytes // 4, device=context.device)

    def all_reduce() -> None:
        dist.all_reduce(gradients)

    sample = timed(context, all_reduce, _pace(context))
    return sample._replace(quantity="communication", shared=True, total_bytes=gradient_bytes)


def _pace(context: ProbeContext, window_s: float = 0.0) -> TimingPlan:
    return TimingPlan(
        warm_ups=WARM_UP_ITERATIONS,
        budget_s=CUDA_BUDGET_S if context.on_cuda else CPU_BUDGET_S,
        least=MIN_WINDOWS,
        most=MAX_WINDOWS,
        window_s=window_s,
    )


# A peak above this share of what was free is too close to running out.
FULL = 0.85
# AdamW allocates its moments at the end of the first step: only the second has its peak.
_FIT_STEPS = 2


def measure_fit(context: ProbeContext) -> list[Sample]:
    """Train alone for two steps, with half the batch each time it does not fit.

    Returns:
        One sample of figures: `micro_batch` that fits, `peak_bytes` of its steps, `free_bytes`
        before them, `total_bytes` of the device.

    Raises:
        NotMeasured: a single sequence does not fit.
    """
    shape = gpt_model.shape_of(context.options)
    gpt_model.return_memory(context)
    free_bytes, total_bytes = device.memory_bytes(context.device)
    # A CPU's process has its peak on record since its start: hold it against the whole machine.
    usable_bytes = free_bytes if context.on_cuda else total_bytes
    batch = shape.batch
    said = ""
    while batch >= 1:
        peak_bytes, said = _try(context, replace(shape, batch=batch))
        gpt_model.return_memory(context)
        if peak_bytes is not None and peak_bytes <= FULL * usable_bytes:
            return [
                Sample(
                    figures={
                        "micro_batch": batch,
                        "peak_bytes": peak_bytes,
                        "free_bytes": free_bytes,
                        "total_bytes": total_bytes,
                    }
                )
            ]
        batch //= 2
    raise NotMeasured(
        f"the GPT of this run does not fit {context.device} even with a batch of one:"
        f" {free_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB are free, {said}"
    )


def _try(context: ProbeContext, shape: Shape) -> tuple[int | None, str]:
    """Return the peak of a step, None where the memory ran out, and either in words."""
    try:
        peak_bytes = _peak_bytes(context, shape)
    except (RuntimeError, MemoryError) as err:
        if not device.is_out_of_memory(err):
            raise
        return None, f"and it ran out: {gpt_model.first_line(err)}"
    return peak_bytes, f"and a step takes {peak_bytes / 1e9:.1f} GB, more than {FULL:.0%} of that"


def _peak_bytes(context: ProbeContext, shape: Shape) -> int:
    if context.on_cuda:
        torch.cuda.reset_peak_memory_stats(context.device)
    model = gpt_model.build(shape, context.device)
    optimizer = gpt_model.optimizer_of(model, context.device)
    tokens = gpt_model.mock_tokens(shape, context.device)
    for _ in range(_FIT_STEPS):
        gpt_model.train_step(model, optimizer, tokens, context)
    if context.on_cuda:
        # Reserved, not allocated: gaps between tensors are gone for others too.
        return int(torch.cuda.max_memory_reserved(context.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
