# SPDX-License-Identifier: Apache-2.0
"""Whether a device calculates correctly: products of integers, of which the exact result is known.

Every entry of the product is a sum of K integers of at most 64 in magnitude. That is below 2^24
for any K used here, so single precision holds every partial sum exactly, and the result does not
depend on the order of the additions: any kernel of any device must give the same bits. The large
matrices are tiled from small ones, so that the expected result is computed on the host, exactly
and at once, while the device has to calculate every entry.
"""

from __future__ import annotations

import torch

from slurm_health.preflight.probes.context import ProbeContext, Sample, WrongResults
from slurm_health.preflight.probes.device import half_precision

LARGEST = 8  # of the integers, in magnitude: exact in every floating-point format in use
TILE = 128
CPU_TILES = 4
CPU_PRODUCTS, CPU_HOT_PRODUCTS = 4, 1
# What the session sets in a round's options for small devices.
CUDA_SIZE = 8192
CUDA_PRODUCTS = 200
_SEED = 20


def measure(context: ProbeContext) -> list[Sample]:
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
