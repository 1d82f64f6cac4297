# SPDX-License-Identifier: Apache-2.0
"""How fast one device multiplies matrices of 8-bit floating-point numbers, where it has them.

Only the rate is measured. Tensor cores may add such products with fewer bits than single precision
has, so no result is the only correct one.
"""

from __future__ import annotations

import functools

import torch

from slurm_health.preflight.probes import values
from slurm_health.preflight.probes.context import NotMeasured, ProbeContext, Sample
from slurm_health.preflight.probes.matmul import windows_ms

# The oldest NVIDIA devices whose tensor cores know it: Ada and Hopper.
_CAPABILITY = (8, 9)
_FIRST_SIZE = 256
# What torch, and CUDA's matrix library, say of a device or a release that has it not.
_LACKING = ("only supported", "not supported", "NOT_SUPPORTED")


def measure(context: ProbeContext) -> list[Sample]:
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
    size = values.size_of(context)
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
