# SPDX-License-Identifier: Apache-2.0
"""Jobs that had the same id, one after another: Slurm counts anew after a reset of its state."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_health import journal
from slurm_health.core.records import RunStarted
from slurm_health.report.model import RunEntries


def jobs_in(runs: Sequence[RunEntries]) -> list[list[RunEntries]]:
    """Return the runs below one job id as those of each job, the oldest job first, at least one.

    Runs of one job were submitted at one time; where that is not known, its attempts count upwards
    and each of them has one start.
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
    if old is None or new is None:
        return False
    if old.submit_time_s is not None and new.submit_time_s is not None:
        return old.submit_time_s != new.submit_time_s
    if old.attempt == new.attempt and None not in (old.start_time_s, new.start_time_s):
        return old.start_time_s != new.start_time_s
    return new.attempt < old.attempt


def _start(run: RunEntries) -> RunStarted | None:
    found = (e.record for e in run.master if isinstance(e.record, RunStarted))
    return next(found, None)


def _place(run: RunEntries) -> tuple[int, int]:
    return journal.attempt_and_check(run.label) or (0, 1)
