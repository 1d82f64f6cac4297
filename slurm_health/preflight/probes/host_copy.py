# SPDX-License-Identifier: Apache-2.0
"""How fast a device exchanges data with its host, and whether it arrives as it was sent.

From and to pinned memory, as data loaders use it: the device fetches and brings the data itself.
All devices of a node do so at the same time, as in training, so that what shares a switch or the
host's memory has its share of it.
"""

from __future__ import annotations

import functools

import torch

from slurm_health.preflight.probes.context import (
    NotMeasured,
    ProbeContext,
    Sample,
    WrongResults,
)
from slurm_health.preflight.probes.timing import Pace, timed

# Over a millisecond at 50 GB/s, which PCIe of generation 5 reaches, and little pinned memory.
CUDA_BYTES = 64 << 20
PACE = Pace(warm_ups=2, budget_s=0.2, least=5, most=20, window_s=0.01)
_WORD_BYTES = 8
# Odd, so that the products of all numbers below 2^64 differ: Knuth's for multiplicative hashing.
_FACTOR = 0x1E3779B97F4A7C15


def measure(context: ProbeContext) -> list[Sample]:
    """Time copies in each direction, and compare what the last one of each brought.

    Returns:
        Two samples of quantity `to_device` and `to_host`; their bytes are counted once.

    Raises:
        WrongResults: data arrived changed.
        NotMeasured: the worker has no accelerator.
    """
    if not context.on_cuda:
        raise NotMeasured("host_copy: only an accelerator exchanges data with its host")
    size = min(int(context.options.get("copy_bytes", CUDA_BYTES)), CUDA_BYTES)
    sent = payload(size, torch.device("cpu")).pin_memory()
    there = torch.empty(sent.numel(), dtype=torch.int64, device=context.device)
    back = torch.empty_like(sent, pin_memory=True)
    to_device = timed(context, functools.partial(there.copy_, sent, non_blocking=True), PACE)
    require_arrived(there, payload(size, context.device), f"from the host to {_me(context)}")
    there.bitwise_not_()  # what lies in the host's memory already must not pass for what arrived
    to_host = timed(context, functools.partial(back.copy_, there, non_blocking=True), PACE)
    require_arrived(back, sent.bitwise_not(), f"from {_me(context)} to the host")
    return [
        to_device._replace(quantity="to_device", total_bytes=size),
        to_host._replace(quantity="to_host", total_bytes=size),
    ]


def _me(context: ProbeContext) -> str:
    return f"device {context.local_rank}"


def payload(size: int, device: torch.device) -> torch.Tensor:
    """Return so many bytes, the same on every device, in which no two words are alike."""
    return torch.arange(1, size // _WORD_BYTES + 1, device=device).mul_(_FACTOR)


def require_arrived(arrived: torch.Tensor, sent: torch.Tensor, way: str) -> None:
    """Make sure that every word is what was sent.

    Raises:
        WrongResults: one is not.
    """
    wrong = int((arrived != sent).sum().item())
    if wrong:
        raise WrongResults(
            f"data changed on its way {way}: {wrong} of {sent.numel()} words arrived as others"
        )
