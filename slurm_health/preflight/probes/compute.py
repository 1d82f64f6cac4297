# SPDX-License-Identifier: Apache-2.0
"""How fast, and whether exactly, one device multiplies matrices."""

from __future__ import annotations

import time

from slurm_health.preflight.probes.context import ProbeContext, Sample, WrongResults
from slurm_health.preflight.probes.timing import TimingPlan, timed

CPU_SIZE, CPU_PRODUCTS = 512, 2
# The windows together span two periods of a CPU quota (100 ms on Linux), or a starved CPU looks
# healthy between two throttles; on a GPU a window must outlast the jitter of its clock.
_CPU_PLAN = TimingPlan(warm_ups=3, budget_s=0.2, least=5, most=5, window_s=0.04)
CUDA_WINDOW_S, CUDA_WINDOWS = 0.25, 4
CUDA_WARM_UP_S = 0.5
# Until a device has reached the clock it can sustain. A burn that is no longer than that reaches it
# on its way: the median of its windows is of the later ones' clock, or of all devices' earlier one.
CUDA_BURN_WARM_UP_S = 3.0


def values(context: ProbeContext) -> list[Sample]:
    """Multiply integers, and compare every value of every product.

    Raises:
        WrongResults: a value differs from the only correct one.
    """
    products = context.size("exact_products", CPU_PRODUCTS)
    _require_exact(context, products)
    return [Sample(figures={"products": products, "wrong": 0})]


def matmul(context: ProbeContext) -> list[Sample]:
    """Multiply square matrices for a few windows of time.

    The option `burn_s` sets how long an accelerator is measured after it has warmed up. The burn
    ends with products of integers, half as many as of `values`, which takes a fifth of a second on
    a current GPU: some devices calculate wrongly only when they are hot.

    Raises:
        WrongResults: a value of those is not exact.
    """
    size = context.size("matmul_size", CPU_SIZE)
    burn_s = float(context.options.get("burn_s", 0.0))
    product = context.compute.product(size, exact=False)
    if context.on_cuda:
        warm_up_s = CUDA_BURN_WARM_UP_S if burn_s > CUDA_BURN_WARM_UP_S else CUDA_WARM_UP_S
        end_s = time.perf_counter() + warm_up_s
        while time.perf_counter() < end_s:  # until its clock and its caches have settled
            for _ in range(5):
                product.multiply()
            context.synchronize()
        windows = max(CUDA_WINDOWS, int(burn_s / CUDA_WINDOW_S))
        sample = timed(
            context, product.multiply, TimingPlan(2, 0.0, windows, windows, CUDA_WINDOW_S)
        )
    else:
        sample = timed(context, product.multiply, _CPU_PLAN, product.multiply)
    if burn_s:
        _require_exact(context, context.size("exact_products", CPU_PRODUCTS) // 2)
    return [sample._replace(flop=2.0 * size**3)]


def _require_exact(context: ProbeContext, products: int) -> None:
    """Multiply integers so often, and make sure that every value of every product is exact.

    Raises:
        WrongResults: a value differs from the only correct one.
    """
    product = context.compute.product(context.size("matmul_size", CPU_SIZE), exact=True)
    wrong = 0
    for _ in range(products):
        product.multiply()
        wrong += product.wrong()
    if wrong:
        name = context.compute.name
        raise WrongResults(
            f"{name} {'computes' if context.on_cuda else 'compute'} wrong results: {wrong} of"
            f" {products * product.values()} values of an integer matrix product are not exact"
        )
