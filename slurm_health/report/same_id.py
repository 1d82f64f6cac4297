# SPDX-License-Identifier: Apache-2.0
"""Jobs that had the same id, one after another: Slurm counts anew after a reset of its state."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_health.records.allocation import is_of_another_job
from slurm_health.records.records import RunStarted
from slurm_health.report.model import RunEntries
from slurm_health.system import journal


def jobs_in(runs: Sequence[RunEntries]) -> list[list[RunEntries]]:
    """Return the runs below one job id as those of each job, the oldest job first, at least one.

    A run that nothing is known of belongs to the job before it.
    """
    jobs: list[list[RunEntries]] = []
    for run in sorted(runs, key=began_s):
        if jobs and not _is_another(jobs[-1][-1], run):
            jobs[-1].append(run)
        else:
            jobs.append([run])
    return [sorted(job, key=_place) for job in jobs] or [[]]


def began_s(run: RunEntries) -> float:
    """Return when a run began; one that nothing is known of is the newest."""
    return run.master[0].time_s if run.master else float("inf")


def _is_another(before: RunEntries, run: RunEntries) -> bool:
    """Tell whether a run belongs to another job than the run before it."""
    old, new = _start(before), _start(run)
    return old is not None and new is not None and is_of_another_job(old, new)


def _start(run: RunEntries) -> RunStarted | None:
    found = (e.record for e in run.master if isinstance(e.record, RunStarted))
    return next(found, None)


def _place(run: RunEntries) -> tuple[int, int]:
    return journal.attempt_and_check(run.label) or (0, 1)
