# SPDX-License-Identifier: Apache-2.0
"""Where the journals of a job are, and what is in them. Reads files; writes none."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from slurm_health import journal
from slurm_health.core.record_codec import Entry
from slurm_health.core.records import RunStarted
from slurm_health.errors import JournalError, RunNotFound, UsageError
from slurm_health.report.build import job_report
from slurm_health.report.model import JobReport, RunEntries

_log = logging.getLogger(__name__)

# 12, or 12_3 for task 3 of an array. What Slurm prints beside that (12.batch) is a step.
_JOB = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?", re.ASCII)
# Tasks of an array as squeue writes them: 12_[1-4,7], with %2 for how many may run at once.
_TASKS = re.compile(r"([0-9]{1,10})_\[([0-9,-]+)(?:%[0-9]+)?\]", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?", re.ASCII)
# A node's name becomes a file's name. Anything else in a journal did not come from Slurm.
_NODE = re.compile(r"[\w-][\w.-]*", re.ASCII)
_NEAR = 5
_MOST_NAMED = 10_000


def tasks_of(root: Path, job: str, cluster: str | None = None) -> list[str]:
    """Return the tasks with a journal that an array's id, or `12_[1-4]`, stands for, in order.

    Nothing where `job` is one job.

    Raises:
        UsageError: `job` is neither.
        RunNotFound: no task of `12_[1-4]` has a journal.
        JournalError: the directories cannot be read.
    """
    if _JOB.fullmatch(job):
        array, wanted = job, None
    elif found := _TASKS.fullmatch(job):
        array, wanted = found[1], _ranges(found[2])
    else:
        raise _no_job_id(job)
    try:
        numbers = _task_numbers(root, array, [cluster] if cluster else _directories(root))
    except OSError as err:
        if wanted is None:
            return []  # a job can be read where the list of all jobs cannot
        raise JournalError(root, f"cannot be read: {err.strerror or err}") from err
    if wanted is not None:
        numbers = {n for n in numbers if any(first <= n <= last for first, last in wanted)}
        if not numbers:
            raise RunNotFound(job, root, _near(root, array))
    return [f"{array}_{number}" for number in sorted(numbers)]


def tasks_asked_for(job: str) -> tuple[str, frozenset[int] | None]:
    """Return an array's id, and the tasks that `12_[1-4]` names.

    None where it names none, or more than are looked for one by one.
    """
    found = _TASKS.fullmatch(job)
    if not found:
        return job, None
    ranges = _ranges(found[2])
    if sum(last - first + 1 for first, last in ranges) > _MOST_NAMED:
        return found[1], None
    return found[1], frozenset(n for first, last in ranges for n in range(first, last + 1))


def _task_numbers(root: Path, array: str, clusters: Iterable[str]) -> set[int]:
    return {
        int(name.removeprefix(f"{array}_"))
        for cluster in clusters
        for name in _directories(root / cluster)
        if name.startswith(f"{array}_") and _JOB.fullmatch(name)
    }


def _ranges(text: str) -> list[tuple[int, int]]:
    found = [_RANGE.fullmatch(part) for part in text.split(",")]
    return [(int(part[1]), int(part[2] or part[1])) for part in found if part]


def _no_job_id(job: str) -> UsageError:
    return UsageError(
        f"{job!r} is not a job id: give one like 12, 12_3 for an array's task, or 12_[1-4]"
    )


def load(
    root: Path, job: str, *, cluster: str | None = None, now_s: float | None = None
) -> JobReport:
    """Return what is known of a job.

    Args:
        root: the directory of all journals.
        job: a job id, or `12_3` for a task of an array.
        cluster: the cluster to prefer where several have that job.
        now_s: the time, to tell a check that runs from one whose master died.

    Raises:
        UsageError: `job` is no job id.
        RunNotFound: there is no journal of it.
        JournalError: a journal cannot be read, or a newer slurm-health wrote it.
    """
    return job_report([read_run(path) for path in runs_of_job(root, job, cluster)], now_s=now_s)


def runs_of_job(root: Path, job: str, cluster: str | None = None) -> list[Path]:
    """Return the directories of a job's checks, oldest first, at least one.

    Where several clusters have a job of this id, `cluster` is preferred, else the one where it
    ran last; a log line says which.

    Raises:
        UsageError: `job` is no job id.
        RunNotFound: there is no journal of it.
        JournalError: the directories cannot be read.
    """
    if not _JOB.fullmatch(job):
        raise _no_job_id(job)
    try:
        found = _runs_by_cluster(root, job)
        if not found:
            raise RunNotFound(job, root, _near(root, job))
    except OSError as err:
        raise JournalError(root, f"cannot be read: {err.strerror or err}") from err
    newest = max(found, key=lambda name: _changed_s(found[name][-1]))
    chosen = cluster if cluster in found else newest
    owner = found[chosen][0].parent.lstat().st_uid
    if owner != os.geteuid():
        _log.warning("the journal of job %s was written by user %d", job, owner)
    if len(found) > 1:
        others = ", ".join(sorted(set(found) - {chosen}))
        _log.warning("job %s of cluster %s; there is also one of %s", job, chosen, others)
    return found[chosen]


def read_run(directory: Path) -> RunEntries:
    """Return everything one check left behind. Files that are not there are empty.

    Raises:
        JournalError: a file cannot be read, or a newer slurm-health wrote it (RecordTooNew).
    """
    read = partial(journal.read_all, directory, of_anybody=True)
    master = read(journal.MASTER)
    return RunEntries(
        label=directory.name,
        job=directory.parent.name,
        cluster=directory.parent.parent.name,
        master=master,
        nodes={node: read(node) for node in _nodes(master)},
        supervisor=read(journal.SUPERVISOR),
        requeue=read(journal.REQUEUE),
        post_mortem=read(journal.POST_MORTEM),
        monitor=read(journal.MONITOR),
    )


def _runs_by_cluster(root: Path, job: str) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    refused: OSError | None = None
    for cluster in _directories(root):
        try:
            found[cluster] = journal.runs_of(root, cluster, job)
        except OSError as err:  # another user's, where several share the root
            refused = err
    found = {cluster: runs for cluster, runs in found.items() if runs}
    if refused is not None and not found:
        raise refused
    return found


def _nodes(master: list[Entry]) -> list[str]:
    started = [entry.record for entry in master if isinstance(entry.record, RunStarted)]
    return [node for node in (started[0].nodes if started else []) if _NODE.fullmatch(node)]


def _directories(path: Path) -> list[str]:
    """Return what is in a directory, but for plain files: directories, and links of array tasks."""
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if not entry.is_file(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _near(root: Path, job: str) -> list[str]:
    """Return jobs that may have been meant: tasks of this array, else the newest ones."""
    jobs = [
        root / cluster / name
        for cluster in _directories(root)
        for name in _directories(root / cluster)
        if _JOB.fullmatch(name)
    ]
    tasks = [path for path in jobs if path.name.startswith(f"{job}_")]
    newest = sorted(tasks or jobs, key=_changed_s, reverse=True)
    return list(dict.fromkeys(path.name for path in newest))[:_NEAR]


def _changed_s(directory: Path) -> float:
    """Return when a run, or a job's list of runs, was last written to."""
    for path in (journal.path_of(directory, journal.MASTER), directory):
        with contextlib.suppress(OSError):  # not there, or not to be seen
            return path.lstat().st_mtime
    return 0.0
