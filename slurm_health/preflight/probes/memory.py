# SPDX-License-Identifier: Apache-2.0
"""How fast a device's memory is, and whether it gives back what was written to it.

How fast: one array is copied to another, larger than any cache.

Whether it gives back: half of what is free is written with one pattern from end to end, and only
then read back, so that no cache holds what is compared. One bit walks through each byte, first as
the only one that is set, then as the only one that is not. The last two patterns are each word's
number and its complement: words that share a cell show there, as all others are alike before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slurm_health.preflight.probes import device
from slurm_health.preflight.probes.context import NotMeasured, ProbeContext, Sample, WrongResults
from slurm_health.preflight.probes.timing import each

COPY_BYTES = 2 << 30
CPU_BYTES = 64 << 20
CUDA_ITERATIONS = 50  # and the bytes: less by the round's options where devices are small
WARM_UP_ITERATIONS = 2
# On a CPU: as many iterations as fit, so that a starved one is not kept at it for long.
CPU_BUDGET_S = 0.15
CPU_ITERATIONS = (3, 10)


def copy(context: ProbeContext) -> list[Sample]:
    """Copy, and time each iteration. It reads and writes every byte once: both are counted."""
    size = int(context.options.get("copy_bytes", COPY_BYTES)) if context.on_cuda else CPU_BYTES
    source = torch.ones(size // 4, device=context.device)
    target = torch.empty_like(source)
    for _ in range(WARM_UP_ITERATIONS):
        target.copy_(source)
    sample = (
        Sample(_on_cuda_ms(context, target, source)) if context.on_cuda else _on_cpu(target, source)
    )
    total_bytes = 2 * source.numel() * source.element_size()
    return [sample._replace(total_bytes=total_bytes)]


def _on_cuda_ms(context: ProbeContext, target: torch.Tensor, source: torch.Tensor) -> list[float]:
    iterations = int(context.options.get("copies", CUDA_ITERATIONS))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    marks[0].record()
    for mark in marks[1:]:
        target.copy_(source)
        mark.record()
    marks[-1].synchronize()
    return [float(begin.elapsed_time(end)) for begin, end in zip(marks, marks[1:])]  # noqa: B905 RUF007 - older Pythons run this


def _on_cpu(target: torch.Tensor, source: torch.Tensor) -> Sample:
    least, most = CPU_ITERATIONS
    return each(lambda: target.copy_(source), least=least, most=most, budget_s=CPU_BUDGET_S)


# More than any device has: half of what is free. The session sets less for small devices.
PATTERN_BYTES = 1 << 40
BLOCK_BYTES = 128 << 20
_BITS, _WORD_BYTES = 8, 8
PATTERNS = 2 * _BITS + 2


def pattern(context: ProbeContext) -> list[Sample]:
    """Write each pattern to half of the free memory, and compare every word that is read back.

    Raises:
        WrongResults: a word is not what was written.
        NotMeasured: the worker has no accelerator.
    """
    if not context.on_cuda:
        raise NotMeasured("memory_pattern: only the memory of an accelerator is tested")
    torch.cuda.empty_cache()
    wanted = int(context.options.get("pattern_bytes", PATTERN_BYTES))
    free_bytes = device.memory_bytes(context.device)[0]
    # Comparing takes a block, and a mark for each of its words, which the allocator rounds up.
    size = min(wanted, max(free_bytes // 2 - 2 * BLOCK_BYTES, free_bytes // 4))
    blocks = [
        torch.empty(
            min(BLOCK_BYTES, size - start) // _WORD_BYTES, dtype=torch.int64, device=context.device
        )
        for start in range(0, size, BLOCK_BYTES)
    ]
    for word in _walking():
        for block in blocks:
            block.fill_(word)
        for number, block in enumerate(blocks):
            _require_same(context, block, block != word, number)
    for sign in (1, -1):
        for number, block in enumerate(blocks):
            _write_numbers(block, number, sign)
        for number, block in enumerate(blocks):
            expected = _write_numbers(torch.empty_like(block), number, sign)
            _require_same(context, block, block != expected, number)
    del blocks, block
    torch.cuda.empty_cache()
    return [Sample(figures={"bytes": size, "patterns": PATTERNS, "wrong": 0})]


def _walking() -> Iterator[int]:
    """Yield words whose bytes have one bit set, each another one, and their complements."""
    for first in range(_BITS):
        word = bytes(1 << (first + place) % _BITS for place in range(_WORD_BYTES))
        yield int.from_bytes(word, "little", signed=True)
        yield ~int.from_bytes(word, "little", signed=True)


def _write_numbers(block: torch.Tensor, number: int, sign: int) -> torch.Tensor:
    """Write to each word its number among all words, counted from 1; negative by its sign."""
    begin = 1 + number * (BLOCK_BYTES // _WORD_BYTES)
    torch.arange(begin * sign, (begin + block.numel()) * sign, sign, out=block)
    return block


def _require_same(
    context: ProbeContext, block: torch.Tensor, wrong: torch.Tensor, number: int
) -> None:
    """Make sure that no word of a block is marked as wrong.

    Raises:
        WrongResults: one is.
    """
    count = int(wrong.sum().item())
    if count:
        place = int(wrong.nonzero()[0].item())
        at_bytes = number * BLOCK_BYTES + place * _WORD_BYTES
        read = int(block[place].item()) % (1 << 64)
        raise WrongResults(
            f"memory of device {context.local_rank} does not give back what was written: {count} of"
            f" {block.numel()} words differ, the first {at_bytes} bytes from where the test begins"
            f" (0x{read:016x})"
        )
