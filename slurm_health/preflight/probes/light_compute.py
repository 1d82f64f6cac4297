# SPDX-License-Identifier: Apache-2.0
"""How fast, and whether exactly, a node's processors multiply, without torch.

Matrices of small integers, whose product is known: by numpy's library, which uses the vector units,
in as many threads as the worker has, each with a product of its own (those of such a library wait
for each other at each product, and burn what time they share with others); where numpy is missing
by Python itself, in one thread, which shows a slow core as well.
Where that library lies beside numpy it is called without it: to load numpy takes 70 ms of a
processor and 84 modules, on every node of every check, and the library 3 ms.
Both are made of one small block again and again, so that the right product is that of the block,
which is computed once, in integers of any size.
"""

from __future__ import annotations

import ctypes
import importlib.util
import operator
import random
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from slurm_health.preflight.probes.context import ProbeContext, Sample, WrongResults
from slurm_health.preflight.probes.timing import Stopwatch

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

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


class Library(NamedTuple):
    """What numpy multiplies with, and the version of that numpy."""

    sgemm: Callable[..., None]
    version: str


# As the library of numpy's own wheels names it since 2.0; the integers that it takes have 64 bits.
_SGEMM = "scipy_cblas_sgemm64_"
_ROW_MAJOR, _AS_IT_IS = 101, 111  # cblas.h
_INT, _LONG, _SCALE, _PLACE = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_MATRIX = (_PLACE, _LONG)
_ARGUMENTS = (*[_INT] * 3, *[_LONG] * 3, _SCALE, *_MATRIX, *_MATRIX, _SCALE, *_MATRIX)


def library_of(packages: Path) -> Library | None:
    """Return the library of the numpy in this directory, if that came with one of its own."""
    installed = [each.name for each in packages.glob("numpy-*.dist-info")]
    found = list((packages / "numpy.libs").glob("lib*openblas*.so*"))
    if len(installed) != 1 or len(found) != 1:
        return None
    try:
        sgemm = getattr(ctypes.CDLL(str(found[0])), _SGEMM)
    except (OSError, AttributeError):  # only numpy can load it, or it has another name for this
        return None
    sgemm.argtypes, sgemm.restype = _ARGUMENTS, None
    return Library(sgemm, installed[0].removesuffix(".dist-info").partition("-")[2])


def _library() -> Library | None:
    spec = None if "numpy" in sys.modules else importlib.util.find_spec("numpy")
    return library_of(Path(spec.origin).parents[1]) if spec and spec.origin else None


def _numpy() -> ModuleType | None:
    try:
        import numpy
    except ImportError:  # it is not installed, or for another Python
        return None
    return numpy


_LIBRARY = _library()
_NUMPY: Any = None if _LIBRARY else _numpy()


def numpy_version() -> str:
    """Return the version of numpy, empty where there is none."""
    if _LIBRARY:
        return _LIBRARY.version
    return str(_NUMPY.__version__) if _NUMPY else ""


def values(context: ProbeContext) -> list[Sample]:
    """Multiply, and compare every entry of every product.

    Raises:
        WrongResults: an entry differs from the only correct value.
    """
    count = PRODUCTS if numpy_version() else PLAIN_PRODUCTS
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
        watch = Stopwatch()
        for _ in range(WINDOWS):
            watch.begin()
            watch.end(*_mean(threads.each(_window)))
        threads.require_exact()
        return [watch.sample()._replace(flop=2.0 * threads.size**3)]


def _window(product: _Product) -> tuple[int, float]:
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
    products, took_s = (sum(each) for each in zip(*windows))  # noqa: B905 - older Pythons run this
    return products / len(windows), took_s / len(windows)


class _Threads:
    """The threads of a worker, each with a product of its own."""

    def __init__(self, context: ProbeContext) -> None:
        device: Any = context.device
        self.count: int = device.threads
        self._products = [_product() for _ in range(self.count)]
        self.size = self._products[0].size

    def __enter__(self) -> _Threads:
        self._pool: ThreadPoolExecutor | None = None
        if self.count > 1:
            from concurrent.futures import ThreadPoolExecutor  # one alone does without it

            self._pool = ThreadPoolExecutor(self.count)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def each(self, work: Callable[[_Product], _T]) -> list[_T]:
        """Do something with every product, all at the same time."""
        return list((self._pool.map if self._pool else map)(work, self._products))

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
    if _LIBRARY:
        return ByLibrary(_LIBRARY)
    return ByNumpy(_NUMPY) if _NUMPY else _ByPython()


class ByLibrary:
    """In single precision, as numpy has it done."""

    size = SIZE

    def __init__(self, library: Library) -> None:
        self._sgemm = library.sgemm
        left, right = _blocks()
        tiles = SIZE // BLOCK
        self._left, self._right = (_singles(block) for block in (left, right))
        self._expected = _singles([[v * tiles for v in row] for row in _multiplied(left, right)])
        self._result = array("f", bytes(len(self._expected) * self._expected.itemsize))
        matrices = (each.buffer_info()[0] for each in (self._left, self._right, self._result))
        left_at, right_at, result_at = ((at, SIZE) for at in matrices)
        shape = (_ROW_MAJOR, _AS_IT_IS, _AS_IT_IS, SIZE, SIZE, SIZE)
        self._arguments = (*shape, 1.0, *left_at, *right_at, 0.0, *result_at)

    def multiply(self) -> None:
        """Do it once more."""
        self._sgemm(*self._arguments)

    def wrong(self) -> int:
        """Return how many entries of the last result are not exact."""
        if self._result.tobytes() == self._expected.tobytes():
            return 0
        return sum(map(operator.ne, self._result, self._expected))


def _singles(block: Rows) -> array[float]:
    """Return a matrix that is made of a block."""
    tiles = SIZE // BLOCK
    rows = array("f", [value for row in block for value in row * tiles])
    return rows * tiles


class ByNumpy:
    """In single precision, by the library that numpy was built with, wherever that is."""

    size = SIZE

    def __init__(self, numpy: Any) -> None:
        tiles = SIZE // BLOCK
        left, right = _blocks()
        single = numpy.float32
        self._left, self._right = (
            numpy.tile(numpy.array(block, dtype=single), (tiles, tiles)) for block in (left, right)
        )
        expected = [[value * tiles for value in row] for row in _multiplied(left, right)]
        self._expected = numpy.array(expected, dtype=single)
        self._result = numpy.zeros((SIZE, SIZE), dtype=single)
        self._matmul = numpy.matmul

    def multiply(self) -> None:
        """Do it once more."""
        self._matmul(self._left, self._right, out=self._result)

    def wrong(self) -> int:
        """Return how many entries of the last result are not exact."""
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
