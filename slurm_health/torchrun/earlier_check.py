# SPDX-License-Identifier: Apache-2.0
"""A check of this attempt of the job, made before its script trains: it need not be repeated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from slurm_health.records.errors import ExitCode
from slurm_health.records.records import Disposition, JobOutcome, RunStarted, VerdictReached
from slurm_health.system import journal
from slurm_health.torchrun.place import TaskPlace

# A check that was adopted and not run again names the one it stands for under this setting.
ADOPTED = "as_checked_in"
# What only a check by `run` records.
_BY_RUN = "nnodes"


@dataclass(frozen=True, kw_only=True)
class EarlierCheck:
    """A check whose verdict holds for this start too."""

    directory: Path
    verdict: VerdictReached
    ended_s: float


def find(own: Path, place: TaskPlace, probes: Collection[str]) -> EarlierCheck | None:
    """Return the check to adopt; None where the nodes are to be checked.

    `own` is the directory of this start's journal, which stands beside the others of the job.

    It must be the newest of this attempt, and not one before a training: a second start of a
    training is a reason to look again. It must have measured all of `probes`, on all nodes.

    Raises:
        JournalError: it cannot be read.
    """
    if place.chosen_start:
        return None
    try:
        runs = [
            run
            for run in journal.runs_of(own.parents[2], place.cluster, own.parent.name)
            if run != own and (journal.attempt_and_check(run.name) or (-1,))[0] == place.attempt
        ]
    except OSError:
        return None
    started: RunStarted | None = None
    verdict: VerdictReached | None = None
    ended_s: float | None = None
    for entry in journal.read_all(runs[-1], journal.MASTER) if runs else ():
        match entry.record:
            case RunStarted() as record:
                started = record
            case VerdictReached() as record:
                verdict = record
            case JobOutcome(disposition=disposition, exit_code=code):
                goes_on = disposition is Disposition.PROCEED and code != ExitCode.UNAVAILABLE
                ended_s = entry.time_s if goes_on else None
            case _:
                pass
    if started is None or verdict is None or ended_s is None:
        return None
    fits = (
        _BY_RUN not in started.settings
        and started.start_time_s == place.start_time_s
        and set(place.nodes) <= {node.node for node in verdict.nodes}
        and set(probes) <= set(str(started.settings.get("check", "")).split(","))
    )
    return EarlierCheck(directory=runs[-1], verdict=verdict, ended_s=ended_s) if fits else None


def measured_in(directory: Path) -> Path:
    """Return where a start's check is: in its own directory, or in that of the one it adopted.

    Raises:
        JournalError: the journal cannot be read.
    """
    for entry in journal.read_all(directory, journal.MASTER):
        if isinstance(entry.record, RunStarted) and ADOPTED in entry.record.settings:
            label = str(entry.record.settings[ADOPTED])
            return directory.parent / label if journal.attempt_and_check(label) else directory
    return directory
