# SPDX-License-Identifier: Apache-2.0
"""A disposable, real Slurm cluster on one machine; see README.md here."""

from .errors import (
    CommandFailed,
    DeadlinePassed,
    JobEnded,
    LabError,
    LabStartFailed,
    LabUnavailable,
)
from .lab import Lab
from .requirements import missing

__all__ = [
    "CommandFailed",
    "DeadlinePassed",
    "JobEnded",
    "Lab",
    "LabError",
    "LabStartFailed",
    "LabUnavailable",
    "missing",
]
