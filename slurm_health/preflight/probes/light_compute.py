# SPDX-License-Identifier: Apache-2.0
"""How fast, and whether exactly, a node's processors multiply, without torch.

Matrices of small integers, whose product is known: by numpy, whose library uses the vector units,
in as many threads as the worker has, each with a product of its own (those of such a library wait
for each other at each product, and burn what time they share with others).
Both are made of one small block again and again, so that the right product is that of the block,
which is computed once, in integers of any size.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from slurm_health.preflight.probes.context import ProbeContext, Sample, WrongResults
from slurm_health.preflight.probes.timing import Stopwatch

NUMPY_VERSION = np.__version__
LARGEST = 8  # of the integers, in magnitude: every partial sum is exact in single precision
BLOCK = 16
SIZE = 512
PRODUCTS = 2
# The windows together span two periods of a CPU quota (100 ms on Linux), as those of torch's probe
# do: with one period, a starved CPU was taken for a healthy one on a busy machine.
WINDOW_S, WINDOWS = 0.04, 5
_SEED = 20

_T = TypeVar("_T")


class Product:
    """A product in single precision, of which the result is known."""

    def __init__(self) -> None:
        tiles = (SIZE // BLOCK, SIZE // BLOCK)
        draw = random.Random(_SEED)  # noqa: S311 - not for secrets; the same on all nodes
        left, right = (
            np.array(
                [[draw.randint(-LARGEST, LARGEST) for _ in range(BLOCK)] for _ in range(BLOCK)]
            )
            for _ in range(2)
        )
        self._left, self._right = (np.tile(each, tiles).astype("f4") for each in (left, right))
        self._expected = (left @ right * tiles[0]).astype("f4")
        self._result = np.zeros((SIZE, SIZE), dtype="f4")

    def multiply(self) -> None:
        """Do it once more."""
        np.matmul(self._left, self._right, out=self._result)

    def wrong(self) -> int:
        """Return how many entries of the last result are not exact."""
        tiles = SIZE // BLOCK
        tiled = self._result.reshape(tiles, BLOCK, tiles, BLOCK)
        return int((tiled != self._expected[None, :, None, :]).sum())


def values(context: ProbeContext) -> list[Sample]:
    """Multiply, and compare every entry of every product.

    Raises:
        WrongResults: an entry differs from the only correct value.
    """
    with _Threads(context) as threads:
        for _ in range(PRODUCTS):
            threads.each(Product.multiply)
            threads.require_exact()
        return [Sample(figures={"products": PRODUCTS * threads.count, "wrong": 0})]


def matmul(context: ProbeContext) -> list[Sample]:
    """Time products for a few windows, and compare every entry of the last ones.

    Raises:
        WrongResults: an entry differs from the only correct value.
    """
    with _Threads(context) as threads:
        threads.each(Product.multiply)  # pages are touched, threads started
        watch = Stopwatch()
        for _ in range(WINDOWS):
            watch.begin()
            watch.end(*_mean(threads.each(_window)))
        threads.require_exact()
        return [watch.sample()._replace(flop=2.0 * SIZE**3)]


def _window(product: Product) -> tuple[int, float]:
    """Multiply for a while; return how often, and the seconds it took."""
    count, elapsed_s = 0, 0.0
    start = time.perf_counter()
    while elapsed_s < WINDOW_S:
        product.multiply()
        count += 1
        elapsed_s = time.perf_counter() - start
    return count, elapsed_s


def _mean(windows: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return how often, and for how many seconds, a thread multiplied in the mean."""
    products, took_s = (sum(each) for each in zip(*windows, strict=True))
    return products / len(windows), took_s / len(windows)


class _Threads:
    """The threads of a worker, each with a product of its own."""

    def __init__(self, context: ProbeContext) -> None:
        device: Any = context.device
        self.count: int = device.threads
        self._products = [Product() for _ in range(self.count)]

    def __enter__(self) -> _Threads:
        self._pool = ThreadPoolExecutor(self.count)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def each(self, work: Callable[[Product], _T]) -> list[_T]:
        """Do something with every product, all at the same time."""
        return list(self._pool.map(work, self._products))

    def require_exact(self) -> None:
        """Compare every entry of every thread's last product.

        Raises:
            WrongResults: one differs from the only correct value.
        """
        if wrong := sum(product.wrong() for product in self._products):
            raise WrongResults(
                f"the processors compute wrong results: {wrong} of"
                f" {self.count * SIZE**2} values of an integer matrix product are not exact"
            )
