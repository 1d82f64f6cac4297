# SPDX-License-Identifier: Apache-2.0
"""Which directory a check's journal lives in, and whether a dead master left one to go on with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from slurm_health import journal
from slurm_health.core.records import Disposition, RunFinished, RunStarted
from slurm_health.errors import JournalError

# Ends of a run whose job leaves its nodes: a master that is started there again has not left.
_LEFT = (Disposition.REQUEUE, Disposition.HOLD)


def choose(root: Path, started: RunStarted) -> tuple[Path, RunStarted]:
    """Return the directory for a run, and the first record it has or is to get.

    The first check of an attempt uses `<attempt>`, further ones `<attempt>-2`, `<attempt>-3`. A
    run that was cut short is taken over if it is of the very same job start; one whose requeue
    did not happen is taken over too, because the job is evidently still here.

    Raises:
        JournalError: an older journal cannot be read.
    """
    job = journal.job_directory(root, started.cluster, started.job_id)
    for name in _names(started.attempt):
        directory = job / name
        records = [entry.record for entry in journal.read_all(directory, journal.MASTER)]
        before = next((r for r in records if isinstance(r, RunStarted)), None)
        if before is None:
            return directory, started
        finished = [record for record in records if isinstance(record, RunFinished)]
        over = finished and finished[-1].disposition not in _LEFT
        if not over and _same_start(before, started):
            return directory, before
    raise AssertionError("names never end")


def link_array_task(root: Path, started: RunStarted) -> None:
    """Let an array task be found under the id its user knows, `12_3`."""
    link = journal.job_directory(root, started.cluster, started.array)
    try:
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(str(started.job_id))
    except OSError as err:
        raise JournalError(link, f"cannot be written: {err.strerror}") from err


def _names(attempt: int) -> Iterator[str]:
    yield str(attempt)
    number = 2
    while True:
        yield f"{attempt}-{number}"
        number += 1


def _same_start(before: RunStarted, now: RunStarted) -> bool:
    """Tell a run of this very start from one of an older job that had the same id."""
    return (
        before.nodes == now.nodes
        and before.user == now.user
        and before.start_time_s == now.start_time_s
    )
