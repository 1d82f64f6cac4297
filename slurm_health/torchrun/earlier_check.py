# SPDX-License-Identifier: Apache-2.0
"""A check of this attempt of the job, made before its script trains: it need not be repeated."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_health.records.errors import ExitCode
from slurm_health.records.record_codec import Entry
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
        runs = journal.runs_of(own.parents[2], place.cluster, own.parent.name)
    except OSError:
        return None
    this_attempt = [run for run in runs if run != own and _attempt(run) == place.attempt]
    if not this_attempt:
        return None
    directory = this_attempt[-1]
    entries = journal.read_all(directory, journal.MASTER)
    started, verdict, ended_s = _told(entries)
    if started is None or verdict is None or ended_s is None:
        return None
    fits = (
        _BY_RUN not in started.settings
        and started.start_time_s == place.start_time_s
        and set(place.nodes) <= {node.node for node in verdict.nodes}
        and set(probes) <= set(str(started.settings.get("check", "")).split(","))
    )
    return EarlierCheck(directory=directory, verdict=verdict, ended_s=ended_s) if fits else None


def measured_in(directory: Path) -> Path:
    """Return where a start's check is: in its own directory, or in that of the one it adopted.

    Raises:
        JournalError: the journal cannot be read.
    """
    started = _told(journal.read_all(directory, journal.MASTER))[0]
    label = started.settings.get(ADOPTED) if started else None
    if not isinstance(label, str) or journal.attempt_and_check(label) is None:
        return directory
    return directory.parent / label


def _attempt(run: Path) -> int | None:
    found = journal.attempt_and_check(run.name)
    return found[0] if found else None


def _told(
    entries: Sequence[Entry],
) -> tuple[RunStarted | None, VerdictReached | None, float | None]:
    """Return a check's beginning, its verdict, and when it ended with the job going on."""
    started: RunStarted | None = None
    verdict: VerdictReached | None = None
    ended_s: float | None = None
    for entry in entries:
        match entry.record:
            case RunStarted() as record:
                started = record
            case VerdictReached() as record:
                verdict = record
            case JobOutcome(disposition=Disposition.PROCEED, exit_code=code):
                ended_s = None if code == ExitCode.UNAVAILABLE else entry.time_s
            case JobOutcome():
                ended_s = None
            case _:
                pass
    return started, verdict, ended_s
