# SPDX-License-Identifier: Apache-2.0
"""A job whose script has failed, as collectors are told of it, and what is said of its output."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from slurm_health.records.script_records import Diagnosed, EventKind, TrainingEvent
from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.diagnosis.failure import FailureDiagnostician
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.framework import DataManager
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


def diagnosed_by_output(output: str, status: int, nodes: tuple[str, ...]) -> Diagnosed:
    """Return what a post-mortem says that has nothing but a script's output and its end.

    `status` as `subprocess` has it: negative for a signal.
    """
    code, signal = (status, 0) if status >= 0 else (128 - status, -status)
    end = ScriptEnd(exit_code=code, signal=signal, nodes=nodes)
    data = DataManager([end, read_output([("out", output)])])
    found = FailureDiagnostician().diagnose(data_manager=data).diagnosed
    assert found is not None, output
    return found


def hang_at(
    cause: str,
    description: str,
    ranks: Sequence[int] = (1,),
    nodes: Sequence[str] = ("n2",),
    **more: Any,
) -> TrainingEvent:
    """Return a hang as the monitor records it, for sure at these ranks but for what is said."""
    where = Diagnosed(
        cause=cause,
        description=description,
        attribution="undecided",
        sureness="certain",
        nodes=list(nodes),
        ranks=list(ranks),
    )
    where = replace(where, **more)
    return TrainingEvent(
        event=EventKind.HANG,
        stalled_s=40.0,
        usual_s=25.0,
        step=7,
        nodes=where.nodes,
        ranks=where.ranks,
        diagnosed=where,
    )
