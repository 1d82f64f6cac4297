# SPDX-License-Identifier: Apache-2.0
"""The largest batch with which the chosen GPT fits this device, found by trying. Scope: solo."""

from __future__ import annotations

import resource
from dataclasses import replace

import torch

from slurm_health.preflight.probes import device, gpt_model
from slurm_health.preflight.probes.context import NotMeasured, ProbeContext, Sample
from slurm_health.preflight.probes.gpt_model import Shape

# A peak above this share of what was free is too close to running out.
FULL = 0.85
# AdamW allocates its moments at the end of the first step: only the second has its peak.
STEPS = 2


def measure(context: ProbeContext) -> list[Sample]:
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
    for _ in range(STEPS):
        gpt_model.train_step(model, optimizer, tokens, context)
    if context.on_cuda:
        # Reserved, not allocated: gaps between tensors are gone for others too.
        return int(torch.cuda.max_memory_reserved(context.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
