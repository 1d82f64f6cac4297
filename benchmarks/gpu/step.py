# SPDX-License-Identifier: Apache-2.0
"""What is measured in one go, how much of it, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from benchmarks.gpu.machine import Machine
from slurm_health.preflight.probes.sizes import TABLE


class NotMeasured(Exception):
    """A step gave no figures; the text says why."""


class Figure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One result. `wrong` says why it cannot be right, empty where it may be."""

    name: str
    value: float | int | str
    unit: str = ""
    wrong: str = ""


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much is measured.

    `nodes` are the numbers of nodes that checks are played on, `cycles` how often a process group
    is formed, `held_bytes` what killed workers hold together, `gpt_sizes` how many rows of the
    table of GPTs are trained. With `cold`, torch's files are also read from their disk.
    """

    runs: int = 30
    nodes: tuple[int, ...] = (2, 4)
    cycles: int = 30
    held_bytes: tuple[int, ...] = (2_000_000_000, 20_000_000_000, 100_000_000_000)
    gpt_sizes: int = len(TABLE)
    cold: bool = True


# To see that everything runs, in minutes even on CPUs.
SMALL = Amount(
    runs=2,
    nodes=(2,),
    cycles=4,
    held_bytes=(50_000_000,),
    gpt_sizes=1,
    cold=False,
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A part of a section. `does` is for those who cannot run it; it takes about `takes_s`."""

    name: str
    does: str
    takes_s: float
    measure: Callable[[Machine], list[Figure]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Steps with one purpose."""

    number: int
    title: str
    steps: Callable[[Amount], list[Step]]
