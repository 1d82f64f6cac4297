# SPDX-License-Identifier: Apache-2.0
"""How fast a device's memory is, and whether it gives back what was written to it.

How fast: one array is copied to another, larger than any cache.

Whether it gives back: half of what is free is written with one pattern from end to end, and only
then read back, so that no cache holds what is compared. One bit walks through each byte, first as
the only one that is set, then as the only one that is not. The last two patterns are each word's
number and its complement: words that share a cell show there, as all others are alike before. The
memory of processors is tested with these two, and little of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slurm_health.preflight.probes.context import ProbeContext, Sample, WrongResults
from slurm_health.preflight.probes.timing import TimingPlan, timed

CPU_COPY_BYTES, CPU_PATTERN_BYTES = 64 << 20, 8 << 20
# On processors as many as fit, so that a starved one is not kept at it for long.
_CPU_PLAN = TimingPlan(warm_ups=2, budget_s=0.15, least=3, most=10)
_CUDA_PLAN = TimingPlan(warm_ups=2, budget_s=0.15, least=10, most=50)
BLOCK_BYTES = 128 << 20
_BITS, _WORD_BYTES = 8, 8
_WORD = 0x0102040810204080  # what is copied


def copy(context: ProbeContext) -> list[Sample]:
    """Copy, and time each iteration. It reads and writes every byte once: both are counted.

    Raises:
        WrongResults: the last copy is not what was copied.
    """
    device, size = context.compute, context.size("copy_bytes", CPU_COPY_BYTES)
    samples = []
    for name in device.memory():
        source = device.fill(device.words(size), _WORD)
        target = device.fill(device.words(size), 0)

        def once(target: object = target, source: object = source) -> None:
            device.copy(target, source)

        sample = timed(context, once, _CUDA_PLAN if context.on_cuda else _CPU_PLAN)
        samples.append(sample._replace(quantity=name, total_bytes=2 * size))
        _require_same(context, name, target, _WORD, 0)
    return samples


def pattern(context: ProbeContext) -> list[Sample]:
    """Write each pattern to half of the free memory, and compare every word that is read back.

    Raises:
        WrongResults: a word is not what was written.
    """
    device, wanted = context.compute, context.size("pattern_bytes", CPU_PATTERN_BYTES)
    tested, walking = 0, list(_walking()) if context.on_cuda else []
    for name in device.memory():
        free_bytes = device.free_bytes()
        # Comparing takes a block, and a mark for each of its words, which the allocator rounds up.
        size = min(wanted, max(free_bytes // 2 - 2 * BLOCK_BYTES, free_bytes // 4))
        tested += size
        blocks = [
            device.words(min(BLOCK_BYTES, size - start)) for start in range(0, size, BLOCK_BYTES)
        ]
        for word in walking:
            for block in blocks:
                device.fill(block, word)
            for number, block in enumerate(blocks):
                _require_same(context, name, block, word, number)
        for sign in (1, -1):
            firsts = [sign * (1 + n * (BLOCK_BYTES // _WORD_BYTES)) for n in range(len(blocks))]
            for first, block in zip(firsts, blocks):  # noqa: B905 - older Pythons run this
                device.number(block, first, sign)
            for number, block in enumerate(blocks):
                expected = device.number(
                    device.words(min(BLOCK_BYTES, size - number * BLOCK_BYTES)),
                    firsts[number],
                    sign,
                )
                _require_same(context, name, block, expected, number)
        del blocks, block
    return [Sample(figures={"bytes": tested, "patterns": len(walking) + 2, "wrong": 0})]


def _walking() -> Iterator[int]:
    """Yield words whose bytes have one bit set, each another one, and their complements."""
    for first in range(_BITS):
        word = bytes(1 << (first + place) % _BITS for place in range(_WORD_BYTES))
        yield int.from_bytes(word, "little", signed=True)
        yield ~int.from_bytes(word, "little", signed=True)


def _require_same(context: ProbeContext, name: str, words: Any, expected: Any, number: int) -> None:
    """Make sure that the words of a block are the expected ones.

    Raises:
        WrongResults: one is not.
    """
    count, place, word = context.compute.difference(words, expected)
    if count:
        of = context.compute.name if context.on_cuda else name or "the processors"
        at_bytes = number * BLOCK_BYTES + place * _WORD_BYTES
        raise WrongResults(
            f"memory of {of} does not give back what was written: {count} of {len(words)} words"
            f" differ, the first {at_bytes} bytes from where the test begins (0x{word:016x})"
        )
