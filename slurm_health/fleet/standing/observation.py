# SPDX-License-Identifier: Apache-2.0
"""What one check says of one node: values only."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from slurm_health.records.verdict import Level

# A node's name becomes a file's name. Anything else in a journal did not come from Slurm.
NODE_NAME = re.compile(r"[\w-][\w.-]{0,254}", re.ASCII)


class Signal(StrEnum):
    """What speaks against a node.

    LEFT_OUT follows from the others and is shown, never counted.
    """

    FAULTY = "faulty"  # the check's verdict
    SLOW = "slow"  # the check's verdict
    ACCUSED = "accused"  # the post-mortem of the job's script holds it at fault
    DEVICE = "device"  # a GPU reported an error, or slowed down for heat or power
    LOST = "lost"  # its agent ended, or Slurm could not start one
    LEFT_OUT = "left out"  # the job drained it, gave it back, or was requeued without it


# What is measured is far below; of smaller figures every mean is a number, and no infinity.
MOST_VALUE = 1e100
COUNTED = frozenset(Signal) - {Signal.LEFT_OUT}


class Figure(msgspec.Struct, frozen=True, array_like=True):
    """What one check measured. `part` is empty for the node as a whole; `metric` names the unit."""

    part: str
    metric: str
    value: float


class Observation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one check says of one node.

    `model` is what its accelerators are; empty where it has none, or that is not known.
    `slowdown` is relative to the healthy nodes of that check. `said` is the verdict's reason, or
    what the signals are. `parts` says of devices what spoke against them, by UUID where known.
    `ran_s` is how long the job's script then ran there, as far as it is known to have ended.
    """

    node: str
    model: str = ""
    level: Level | None = None
    component: str = ""
    slowdown: float = 1.0
    said: str = ""
    signals: tuple[Signal, ...] = ()
    figures: tuple[Figure, ...] = ()
    parts: dict[str, str] = {}
    ran_s: float = 0.0


class CheckSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One check: `label` is its directory's name, `time_s` when it began."""

    label: str
    time_s: float
    seen: tuple[Observation, ...]


class JobSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's journal says.

    `stamp` changes when it does; with this stamp it is final from `final_s` on. `trouble` says why
    a part of it could not be read.
    """

    uid: int
    stamp: str
    final_s: float
    checks: tuple[CheckSeen, ...] = ()
    trouble: str = ""
