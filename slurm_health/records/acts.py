# SPDX-License-Identifier: Apache-2.0
"""The names of what is done to nodes and to a job, as the journal writes them."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class _Name(StrEnum):
    """A name in the journal. One that only a newer version knows is kept as it is written."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown


class Action(_Name):
    """What is done to nodes, or to the job."""

    DRAIN = "drain"
    DROP = "drop"  # the job goes on with fewer nodes
    EXCLUDE = "exclude"  # the job's next attempt is to run on other nodes
    REQUEUE = "requeue"
    HOLD = "hold"
    PROCEED = "proceed"
    CANCEL = "cancel"  # by the monitor, where a training hangs and its user wants that
    END_SCRIPT = "end_script"  # the same, so that the script can be started again


class Disposition(_Name):
    """What becomes of the job."""

    PROCEED = "proceed"
    REQUEUE = "requeue"
    HOLD = "hold"
    STOP = "stop"

    @property
    def leaves(self) -> bool:
        """Whether the job leaves its nodes: Slurm ends this attempt of it."""
        return self in {Disposition.REQUEUE, Disposition.HOLD}
