# SPDX-License-Identifier: Apache-2.0
"""What a rank does, by the Python stack of its main thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from slurm_health.training.diagnosis.seen import Frame

_OF_A_LIBRARY = ("site-packages/", "dist-packages/", "/lib/python", "<frozen", "<string>")
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_BACKWARD = "_engine_run_backward"
_LOADERS = ("torch/utils/data/",)
_CHECKPOINTS = ("torch/serialization.py", "torch/distributed/checkpoint/", "safetensors/")
_NOT_NAMES = frozenset({"wrapper", "_wait", "wait"})


class Doing(Enum):
    """What a rank does, in words."""

    COLLECTIVE = "in a collective"
    LOADING = "waits for its data loader"
    CHECKPOINT = "writes or reads a checkpoint"
    OWN_CODE = "is in code of its own"
    NOT_KNOWN = "does not say where it is"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is: `what` is the collective's name, `at` the deepest line of the user's."""

    doing: Doing
    what: str = ""
    at: str = ""


def place_of(stack: Sequence[Frame]) -> Place:
    """Return where a stack is, outermost call first."""
    own = [each for each in stack if not any(mark in each.file for mark in _OF_A_LIBRARY)]
    at = f"{own[-1].file.rpartition('/')[2]}:{own[-1].line}" if own else ""
    if not stack:
        return Place(doing=Doing.NOT_KNOWN)
    for frame in stack:
        if frame.file.endswith(_COLLECTIVES) and frame.function not in _NOT_NAMES:
            return Place(doing=Doing.COLLECTIVE, what=frame.function, at=at)
        if frame.function == _BACKWARD:
            return Place(doing=Doing.COLLECTIVE, what="backward", at=at)
    for doing, files in ((Doing.CHECKPOINT, _CHECKPOINTS), (Doing.LOADING, _LOADERS)):
        if any(mark in frame.file for frame in stack for mark in files):
            return Place(doing=doing, at=at)
    return Place(doing=Doing.OWN_CODE, at=at)
