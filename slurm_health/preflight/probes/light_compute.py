# SPDX-License-Identifier: Apache-2.0
"""How fast, and whether exactly, a node's processors multiply, without torch.

Matrices of small integers, whose product is known: by numpy, whose library uses the vector units,
in as many threads as the worker has, each with a product of its own (those of such a library wait
for each other at each product, and burn what time they share with others); where numpy is missing
by Python itself, in one thread, which shows a slow core as well.
Both are made of one small block again and again, so that the right product is that of the block,
which is computed once, in integers of any size.
"""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from slurm_health.preflight.probes.context import ProbeContext, Sample, WrongResults

try:
    import numpy
except ImportError:  # it is not installed, or for another Python
    numpy = None  # type: ignore[assignment]

LARGEST = 8  # of the integers, in magnitude: every partial sum is exact in single precision
BLOCK = 16
SIZE, PLAIN_SIZE = 512, 32
PRODUCTS, PLAIN_PRODUCTS = 2, 1
# The windows together span two periods of a CPU quota (100 ms on Linux), as those of torch's probe
# do: with one period, a starved CPU was taken for a healthy one on a busy machine.
WINDOW_S, WINDOWS = 0.04, 5
_SEED = 20

Rows = list[list[int]]
_T = TypeVar("_T")


class _Product(Protocol):
    """A product of which the result is known."""

    size: int

    def multiply(self) -> None:
        """Do it once more."""

    def wrong(self) -> int:
        """Return how many entries of the last result are not exact."""


def numpy_version() -> str:
    """Return the version of numpy, empty where there is none."""
    return str(numpy.__version__) if numpy else ""


def values(context: ProbeContext) -> list[Sample]:
    """Multiply, and compare every entry of every product.

    Raises:
        WrongResults: an entry differs from the only correct value.
    """
    count = PRODUCTS if numpy else PLAIN_PRODUCTS
    with _Threads(context) as threads:
        for _ in range(count):
            threads.each(lambda product: product.multiply())
            threads.require_exact()
        return [Sample(figures={"products": count * threads.count, "wrong": 0})]


def matmul(context: ProbeContext) -> list[Sample]:
    """Time products for a few windows, and compare every entry of the last ones.

    Raises:
        WrongResults: an entry differs from the only correct value.
    """
    with _Threads(context) as threads:
        threads.each(lambda product: product.multiply())  # pages are touched, threads started
        iteration_ms = [_mean_ms(threads.each(_window)) for _ in range(WINDOWS)]
        threads.require_exact()
        return [Sample(iteration_ms=iteration_ms, flop=2.0 * threads.size**3)]


def _window(product: _Product) -> tuple[float, int]:
    """Multiply for a while; return the seconds it took, and how often."""
    count, elapsed_s = 0, 0.0
    start = time.perf_counter()
    while elapsed_s < WINDOW_S:
        product.multiply()
        count += 1
        elapsed_s = time.perf_counter() - start
    return elapsed_s, count


def _mean_ms(windows: Iterable[tuple[float, int]]) -> float:
    """Return the mean milliseconds of a product, over what threads did at the same time."""
    took_s, count = 0.0, 0
    for window_s, products in windows:
        took_s += window_s
        count += products
    return took_s * 1e3 / count


class _Threads:
    """The threads of a worker, each with a product of its own."""

    def __init__(self, context: ProbeContext) -> None:
        device: Any = context.device
        self.count: int = device.threads
        self._products = [_product() for _ in range(self.count)]
        self.size = self._products[0].size

    def __enter__(self) -> _Threads:
        self._pool = ThreadPoolExecutor(self.count)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def each(self, work: Callable[[_Product], _T]) -> list[_T]:
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
                f" {self.count * self.size**2} values of an integer matrix product are not exact"
            )


def _product() -> _Product:
    return _ByNumpy() if numpy else _ByPython()


class _ByNumpy:
    """In single precision, by the library that numpy was built with."""

    size = SIZE

    def __init__(self) -> None:
        tiles = SIZE // BLOCK
        left, right = _blocks()
        single = numpy.float32
        self._left, self._right = (
            numpy.tile(numpy.array(block, dtype=single), (tiles, tiles)) for block in (left, right)
        )
        expected = [[value * tiles for value in row] for row in _multiplied(left, right)]
        self._expected = numpy.array(expected, dtype=single)
        self._result = numpy.zeros((SIZE, SIZE), dtype=single)

    def multiply(self) -> None:
        numpy.matmul(self._left, self._right, out=self._result)

    def wrong(self) -> int:
        tiles = SIZE // BLOCK
        tiled = self._result.reshape(tiles, BLOCK, tiles, BLOCK)
        return int((tiled != self._expected[None, :, None, :]).sum())


class _ByPython:
    """In Python's own integers, row by row."""

    size = PLAIN_SIZE

    def __init__(self) -> None:
        self._tiles = PLAIN_SIZE // BLOCK
        left, right = _blocks()
        self._left, self._right = (self._tiled(block) for block in (left, right))
        self._expected = self._tiled(
            [[value * self._tiles for value in row] for row in _multiplied(left, right)]
        )
        self._result: Rows = []

    def _tiled(self, block: Rows) -> Rows:
        return [row * self._tiles for row in block] * self._tiles

    def multiply(self) -> None:
        self._result = _multiplied(self._left, self._right)

    def wrong(self) -> int:
        rows = zip(self._result, self._expected, strict=True)
        return sum(sum(map(operator.ne, row, expected)) for row, expected in rows)


def _blocks() -> tuple[Rows, Rows]:
    """Return two blocks of integers, the same on all nodes."""
    draw = random.Random(_SEED)  # noqa: S311 - not for secrets
    left, right = (
        [[draw.randint(-LARGEST, LARGEST) for _ in range(BLOCK)] for _ in range(BLOCK)]
        for _ in range(2)
    )
    return left, right


def _multiplied(left: Rows, right: Rows) -> Rows:
    columns = list(zip(*right, strict=True))
    return [[sum(map(operator.mul, row, column)) for column in columns] for row in left]
