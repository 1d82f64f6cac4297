# SPDX-License-Identifier: Apache-2.0
"""How fast each NUMA node's memory is, and whether it gives back what was written, without torch.

Bytes are copied by the C library's own copy, which needs no numpy. The thread runs on the
processors of the memory node that it is at, so that what it touches first lies there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from slurm_health.preflight.probes import host
from slurm_health.preflight.probes.context import ProbeContext, Sample, WrongResults
from slurm_health.preflight.probes.timing import each

# Larger than caches are; little enough that nobody runs short of memory by it.
COPY_BYTES, PATTERN_BYTES = 64 << 20, 8 << 20
LEAST, MOST, BUDGET_S = 3, 10, 0.15
_BLOCK_BYTES = 1 << 20
_SEED = 21
_INVERTED = bytes(255 - value for value in range(256))


def copy(_: ProbeContext) -> list[Sample]:
    """Copy, and time each copy: it reads and writes every byte once, and both are counted.

    Raises:
        WrongResults: a copy is not what was copied.
    """
    samples = []
    for quantity, source, target in _each_node(COPY_BYTES):
        sample = _copied(source, target, quantity)
        samples.append(sample._replace(quantity=quantity, total_bytes=2 * COPY_BYTES))
    return samples


def pattern(_: ProbeContext) -> list[Sample]:
    """Write a pattern and its inverse, and read both back; how fast that is, is told, not judged.

    What other jobs do to the memory of a node that they share shows in its speed, not in what it
    holds.

    Raises:
        WrongResults: something else came back.
    """
    figures: dict[str, int | float | str] = {"tested_bytes": 0}
    for quantity, source, target in _each_node(PATTERN_BYTES):
        inverted = source[:_BLOCK_BYTES].translate(_INVERTED) * (PATTERN_BYTES // _BLOCK_BYTES)
        fastest_ms = min(_copied(source, target, quantity, most=LEAST).iteration_ms)
        _copied(inverted, target, quantity, most=1)
        rate = round(2 * PATTERN_BYTES / fastest_ms / 1e6, 1)
        figures[f"{quantity} gb_per_s".strip()] = rate
        figures["tested_bytes"] = int(figures["tested_bytes"]) + 2 * PATTERN_BYTES
    return [Sample(figures=figures)]


def _each_node(size: int) -> Iterator[tuple[str, bytes, bytearray]]:
    """Yield what to copy and where to, of each NUMA node, and its name where there are several."""
    nodes = host.numa_nodes()
    block = random.Random(_SEED).randbytes(_BLOCK_BYTES)  # noqa: S311 - not for secrets
    for number, processors in nodes.items():
        with host.only_on(processors):
            name = f"NUMA {number}" if len(nodes) > 1 else ""
            yield name, block * (size // _BLOCK_BYTES), bytearray(size)


def _copied(source: bytes, target: bytearray, quantity: str, most: int = MOST) -> Sample:
    """Copy as often as there is time; make sure that the last copy is whole."""
    view = memoryview(target)

    def work() -> None:
        view[:] = source

    work()  # its pages are there from now on
    sample = each(work, least=min(LEAST, most), most=most, budget_s=BUDGET_S)
    if target != source:
        wrong = sum(one != other for one, other in zip(target, source, strict=True))
        where = f" of {quantity}" if quantity else ""
        raise WrongResults(
            f"the memory{where} does not give back what was written: {wrong} of {len(source)} bytes"
            " differ"
        )
    return sample
