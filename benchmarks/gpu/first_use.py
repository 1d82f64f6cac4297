# SPDX-License-Identifier: Apache-2.0
"""6: what is slow the first time: importing torch, context, product, collective; cold and warm."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from benchmarks.gpu.child import Child, running
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.step import Amount, Figure, Section, Step

RANKS = 2
_LIMIT_S = 300.0


def steps(amount: Amount) -> list[Step]:
    """Return a step with files that are in memory, and one with files that are on disk only."""
    does = "time the first import, context, product and collective of two processes"
    warm = Step(
        name="warm",
        does=f"{does}, with torch's files in memory",
        takes_s=60.0,
        measure=partial(_measured, cold=False),
    )
    cold = Step(
        name="cold",
        does=f"{does}, with torch's files on disk only",
        takes_s=120.0,
        measure=partial(_measured, cold=True),
    )
    # The second run of two finds in memory what the first has read, whoever read it before.
    return [cold, warm] if amount.cold else [warm]


SECTION = Section(number=6, title="first uses", steps=steps)


def _measured(machine: Machine, *, cold: bool) -> list[Figure]:
    figures = []
    if cold:
        dropped_bytes = drop_from_memory(machine.torch_directories)
        figures.append(Figure(name="dropped", value=round(dropped_bytes / 1e9, 2), unit="GB"))
    with tempfile.TemporaryDirectory() as directory:
        words = (RANKS, Path(directory) / "store", 0 if machine.on_cpus else 1)
        ranks = [
            Child(machine, "first_use", rank, *words, environ=environ)
            for rank, environ in enumerate(machine.environ_of_ranks(RANKS))
        ]
        with running(ranks):
            taken = ranks[0].event(_LIMIT_S)
            ranks[1].wait()
    return figures + [
        Figure(name=name, value=round(elapsed_s, 4), unit="s") for name, elapsed_s in taken.items()
    ]


def drop_from_memory(directories: Iterable[str]) -> int:
    """Have the kernel forget what it has read of these files; return how large they are in bytes.

    It keeps what a running process has mapped: nothing else may be using torch.
    """
    total_bytes = 0
    for path in (path for top in directories for path in Path(top).rglob("*")):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                total_bytes += os.fstat(file).st_size
            finally:
                os.close(file)
    return total_bytes
