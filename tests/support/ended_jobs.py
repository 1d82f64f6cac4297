# SPDX-License-Identifier: Apache-2.0
"""A job whose script has failed, as collectors are told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.monitor.collector import EndedJob


def job(directory: Path, **changes: Any) -> EndedJob:
    given: dict[str, Any] = {
        "end": ScriptEnd(exit_code=1, nodes=("n1",)),
        "environ": {"SLURM_JOB_ID": "12"},
        "node": "n1",
        "directory": directory,
        "ended_s": 2e9,
        "duration_s": 2e9,
    }
    return EndedJob(**{**given, **changes})
