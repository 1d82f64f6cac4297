# SPDX-License-Identifier: Apache-2.0
"""3: process groups formed and left again: how long that takes, and what it leaves behind."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu.child import Child, running
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.step import Amount, Figure, Section, Step

RANKS = 2
_START_LIMIT_S = 180.0
# What a worker may lose in a round, of which a check has a dozen or two.
_LEAST_LEAK = {
    "descriptors": 0.5,
    "threads": 0.5,
    "resident_bytes": 32e6,
    "device_bytes": 32e6,
}
_LEAST_CYCLES = 20  # fewer do not tell what is lost for good from what is still growing
_TIMES = ("init_s", "first_s", "second_s", "destroy_s")

Cycle = Mapping[str, float]


def steps(amount: Amount) -> list[Step]:
    """Return the one step."""
    does = (
        f"{RANKS} processes form a group, gather twice and leave it, {amount.cycles} times; count"
        " seconds, descriptors, threads and memory"
    )
    measure = partial(_measured, amount.cycles)
    return [Step(name=f"{RANKS} ranks", does=does, takes_s=120.0, measure=measure)]


SECTION = Section(number=3, title="process groups, again and again", steps=steps)


def run_cycles(
    machine: Machine, cycles: int, environ: Mapping[str, str]
) -> tuple[list[Cycle], str]:
    """Return what the first rank says of each cycle, and all that it printed.

    Raises:
        NotMeasured: a process ended or said nothing.
    """
    with tempfile.TemporaryDirectory() as directory:
        words = (RANKS, Path(directory) / "store", cycles, 0 if machine.on_cpus else 1)
        environs = machine.environ_of_ranks(RANKS)
        ranks = [
            Child(machine, "cycles", rank, *words, environ={**own, **environ})
            for rank, own in enumerate(environs)
        ]
        with running(ranks):
            found: list[Cycle] = [ranks[0].event(_START_LIMIT_S) for _ in range(cycles)]
            for rank in ranks:
                rank.wait()
            return found, ranks[0].errors()


def _measured(cycles: int, machine: Machine) -> list[Figure]:
    found, _ = run_cycles(machine, cycles, {})
    return [*_times(found), *(drift(found, name) for name in _LEAST_LEAK)]


def _times(found: Sequence[Cycle]) -> list[Figure]:
    figures = []
    for name in _TIMES:
        later_s = statistics.median(each[name] for each in found[1:])
        figures += [
            Figure(name=f"{name[:-2]}, first cycle", value=round(found[0][name], 4), unit="s"),
            Figure(name=f"{name[:-2]}, later", value=round(later_s, 4), unit="s"),
        ]
    return figures


def drift(found: Sequence[Cycle], name: str) -> Figure:
    """Return what each cycle adds for good, once the first third has filled caches and pools."""
    settled = len(found) // 3
    added = (found[-1][name] - found[settled][name]) / max(1, len(found) - 1 - settled)
    is_leak = len(found) >= _LEAST_CYCLES and added >= _LEAST_LEAK[name]
    wrong = "every cycle leaves some behind" if is_leak else ""
    return Figure(name=f"{name} per cycle", value=round(added, 3), wrong=wrong)
