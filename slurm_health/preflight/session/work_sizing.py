# SPDX-License-Identifier: Apache-2.0
"""How much work the probes give to the accelerators of a run: the same on all of its nodes. Pure.

What a current GPU does in milliseconds takes a small device minutes. So each worker measures for a
moment how fast its device is, and the work of the whole run follows from that: times are compared
between nodes, and only the same work can be. A device that reaches `FULL_GFLOP_PER_S` and
`FULL_GB_PER_S`, as every GPU of the last ten years does at its lowest clock, gets the full work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_high

from slurm_health.records.records import Figure, WorkersReady

FULL_GFLOP_PER_S = 2000.0
FULL_GB_PER_S = 100.0
# Of slower devices: what one product, and one copy, may take.
PRODUCT_S, COPY_S = 0.01, 0.005
LEAST_SIZE, LEAST_COPY_BYTES, LEAST_GATHER_BYTES = 128, 1 << 20, 256 << 10
_COPIES_PER_GATHER = 64  # the parts of all ranks come to about as much as a copy
# All that a probe holds at once, in arrays of the size that is chosen here.
_MATRICES, _COPIES = 16, 4
_COPIES_PER_PATTERN = 4  # 18 patterns, each written and read, come to a second


@dataclass(frozen=True, kw_only=True)
class Work:
    """One iteration of each probe, and how often those repeat that count their iterations.

    `matmul_size` is rows and columns of a product, `exact_products` how many are compared,
    `pattern_bytes` how much memory is tested at most: half of what is free, if that is less.
    """

    matmul_size: int = 8192
    exact_products: int = 200
    copy_bytes: int = 2 << 30
    copies: int = 50
    gather_bytes: int = 128 << 20
    pattern_bytes: int = 1 << 40

    def options(self) -> dict[str, Figure]:
        """Return the options of a round that make every worker do this work."""
        return {
            "matmul_size": self.matmul_size,
            "exact_products": self.exact_products,
            "copy_bytes": self.copy_bytes,
            "copies": self.copies,
            "gather_bytes": self.gather_bytes,
            "pattern_bytes": self.pattern_bytes,
        }

    def reduced(self) -> frozenset[str]:
        """Return the probes that do less than their full work: peaks say nothing of these."""
        less = {
            "matmul": self.matmul_size < FULL.matmul_size,
            "memory_copy": self.copy_bytes < FULL.copy_bytes,
            "node_allgather": self.gather_bytes < FULL.gather_bytes,
            "rail_allgather": self.gather_bytes < FULL.gather_bytes,
            "allgather": self.gather_bytes < FULL.gather_bytes,
        }
        return frozenset(probe for probe, is_less in less.items() if is_less)


FULL = Work()


def work_for(nodes: Sequence[WorkersReady]) -> Work:
    """Return the work of a run with these accelerators.

    It fits the smallest memory, and is sized for the typical speed: a slow device among fast ones
    is what the run is to find. A speed or a memory of 0 is not known, and restricts nothing.

    Args:
        nodes: what each said when its workers were ready for the first time.
    """
    gflop_per_s = _typical([each.gflop_per_s for each in nodes])
    gb_per_s = _typical([each.memory_gb_per_s for each in nodes])
    known = [each.free_bytes for each in nodes if each.free_bytes]
    devices = max((len(each.devices) for each in nodes), default=1)
    size, products = FULL.matmul_size, FULL.exact_products
    copy_bytes, copies, gather_bytes = FULL.copy_bytes, FULL.copies, FULL.gather_bytes
    pattern_bytes = FULL.pattern_bytes
    if gflop_per_s and gflop_per_s < FULL_GFLOP_PER_S:
        while size > LEAST_SIZE and 2.0 * size**3 > gflop_per_s * 1e9 * PRODUCT_S:
            size //= 2
        products //= 20
    if gb_per_s and gb_per_s < FULL_GB_PER_S:
        copy_bytes = max(LEAST_COPY_BYTES, _power_of_two(int(gb_per_s * 1e9 * COPY_S / 2)))
        gather_bytes = max(LEAST_GATHER_BYTES, copy_bytes // _COPIES_PER_GATHER)
        copies //= 5
        pattern_bytes = copy_bytes * _COPIES_PER_PATTERN
    if known:
        free_bytes = min(known)
        while size > LEAST_SIZE and _MATRICES * 2 * size**2 > free_bytes:
            size //= 2
        copy_bytes = min(copy_bytes, _power_of_two(free_bytes // _COPIES))
        gather_bytes = min(gather_bytes, _power_of_two(free_bytes // (_COPIES * 2 * devices)))
    return Work(
        matmul_size=size,
        exact_products=products,
        copy_bytes=copy_bytes,
        copies=copies,
        gather_bytes=gather_bytes,
        pattern_bytes=pattern_bytes,
    )


def typical_gflop_per_s(nodes: Iterable[WorkersReady]) -> float:
    """Return how fast a typical node multiplies matrices, 0 where that is not known."""
    return _typical([each.gflop_per_s for each in nodes])


def _typical(speeds: Sequence[float]) -> float:
    """Return the higher median: of two nodes the faster one, so that the other shows as slow."""
    known = [speed for speed in speeds if speed > 0]
    return median_high(known) if known else 0.0


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not above it."""
    return 1 << max(0, number.bit_length() - 1)
