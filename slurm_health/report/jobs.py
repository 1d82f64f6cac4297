# SPDX-License-Identifier: Apache-2.0
"""Jobs in a list, one line each: the caller's latest ones, or the tasks of an array."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from slurm_health.records.decoding import from_msgpack
from slurm_health.records.errors import JournalError, SlurmError
from slurm_health.records.text import NOTHING, cut, duration_text, one_line
from slurm_health.records.verdict import Severity
from slurm_health.report import read
from slurm_health.report.build import story_of
from slurm_health.report.export import LatestJob
from slurm_health.report.find import JOB, directories
from slurm_health.report.layout import Page, Tinted
from slurm_health.report.story import Story
from slurm_health.report.summary import summary_of
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import ListedJob

_log = logging.getLogger(__name__)
_SLURM_LIMIT_S = 5.0  # the list can be printed without Slurm's answer
_NAMED_AMONG = 200  # of the latest jobs, those of a name are listed
# Limits of reading other users' journals: of one job, and of all jobs of one user.
_MEMORY_BYTES = 2 << 30
_ANSWER_BYTES = 1 << 20
_USER_LIMIT_S = 15.0
_NOT_STARTED = frozenset({"PENDING", "CONFIGURING"})
_BAD = (Severity.ERROR, Severity.WARNING, Severity.UNDECIDED)
_NAME, _STATE = 16, 11  # columns at most
_LEAST_VERDICT = 20


class LatestJobs(NamedTuple):
    """Jobs, newest first, and why Slurm could not be asked which are pending; empty if it was.

    Without its answer jobs without a journal are missing.
    """

    jobs: list[LatestJob]
    unasked: str = ""


class _JobDirectory(NamedTuple):
    """A job's newest directory, or that of an array's newest task."""

    changed_s: float
    job: str
    path: Path
    tasks: int
    uid: int

    def unread(self, why: str) -> LatestJob:
        """Return the line of a job whose journal cannot be read."""
        cluster = self.path.parent.name
        return LatestJob(job=self.job, cluster=cluster, state="unknown", found=why)


def in_short(story: Story, *, job: str = "", state: str = "") -> LatestJob:
    """Return a job as a line of a list; `state` is Slurm's word on it, empty if it gives none."""
    summary, started = summary_of(story), story.last.started
    headline = summary.headline
    bad = [finding.what for finding in summary.findings if finding.severity in _BAD]
    began_s = story.last.started_s
    return LatestJob(
        job=job or story.job,
        state=state or summary.outcome,
        found="; ".join([headline.what, *(what for what in bad if what not in headline.what)]),
        severity=headline.severity,
        cluster=story.cluster,
        name=story.name,
        script=story.script,
        started_s=began_s,
        age_s=round(story.now_s - began_s, 1) if story.now_s and began_s else None,
        nodes=len(started.nodes) if started else 0,
        attempts=len({run.attempt for run in story.runs}),
    )


def list_text(jobs: Sequence[LatestJob], page: Page) -> str:
    """Return a line for each job: id, name, state, verdict and age; on a terminal they fit it."""
    several = len({job.cluster for job in jobs if job.cluster}) > 1
    cells = [["JOB", "NAME", "STATE", "AGE"]]
    for job in jobs:
        age = NOTHING
        if job.age_s is not None:
            age = duration_text(60 * (job.age_s // 60) if job.age_s >= 120 else job.age_s)
        number = f"{job.job} {job.cluster}" if several else job.job
        name = cut(job.name or job.script or NOTHING, _NAME)
        cells.append([number, name, cut(job.state, _STATE), age])
    beside = sum(max(len(row[n]) for row in cells) + 2 for n in range(4))
    rows: list[list[str | Tinted]] = [[*cells[0][:3], "VERDICT", "AGE"]]
    for row, job in zip(cells[1:], jobs, strict=True):
        room = max(_LEAST_VERDICT, page.width - beside) if page.width else len(job.found)
        verdict = Tinted(cut(one_line(job.found), room), Severity(job.severity), room)
        rows.append([*row[:3], verdict, row[3]])
    return "\n".join(page.table(rows))


def latest_jobs(
    root: Path,
    count: int,
    *,
    cluster: str | None,
    now_s: float,
    environ: Mapping[str, str],
    name: str = "",
) -> LatestJobs:
    """Return the caller's latest jobs, newest first: those that wait, and `count` with a journal.

    With a `name` they are those whose job or script has it, of the latest `_NAMED_AMONG`.

    Raises:
        JournalError: the directory of all journals cannot be read.
    """
    try:
        most = max(count, _NAMED_AMONG) if name else count
        newest = _newest(root, most, [cluster] if cluster else journal.clusters_in(root))
    except OSError as err:
        raise JournalError(root, f"cannot be read: {err.strerror or err}") from err
    queue: dict[str, list[ListedJob]] = {}
    unasked = ""
    try:
        client = Client(environ, patience_s=0, deadline_s=_SLURM_LIMIT_S)
        for job in client.jobs_of(os.geteuid()):
            queue.setdefault(job.whole, []).append(job)
    except SlurmError as err:
        unasked = err.in_short
    spent_s: dict[int, float] = {}
    jobs = []
    for directory in newest:
        work = partial(_from_journal, directory, queue, now_s)
        own = directory.uid == os.geteuid()
        jobs.append(work() if own else _of_other_user(directory, work, spent_s))
    known = {job.job.partition("_")[0] for job in jobs if job.job.partition("_")[0] in queue}
    new = {job.job for job in jobs if job.job in queue and _id_is_reused(queue[job.job], job)}
    waiting = [
        LatestJob(
            job=task.job,
            name=task.name,
            nodes=task.nodes,
            state=task.word,
            age_s=max(0.0, now_s - task.submitted_s),
            found="not checked yet" if task.state in _NOT_STARTED else "no journal",
        )
        for array, tasks in sorted(queue.items(), key=lambda job: int(job[0]), reverse=True)
        for task in tasks
        if not task.ended and array not in known - new
    ]
    if name:
        waiting, jobs = ([j for j in of if name in (j.name, j.script)] for of in (waiting, jobs))
    return LatestJobs([*waiting[:count], *jobs[:count]], unasked)


def _id_is_reused(queued: Sequence[ListedJob], job: LatestJob) -> bool:
    """Return whether Slurm has given the id of a checked job to one that has not started."""
    return (
        len(queued) == 1
        and queued[0].restarts == 0
        and job.started_s is not None
        and queued[0].submitted_s > job.started_s
    )


def _newest(root: Path, count: int, clusters: Sequence[str]) -> list[_JobDirectory]:
    """Return the jobs that were checked last, newest first; an array is one of them.

    They are the caller's, or all users' if the caller is root, whom a log line warns of
    directories without a status.
    """
    arrays: dict[tuple[str, str, int], list[tuple[float, Path]]] = {}
    for cluster in clusters:
        names = directories(root / cluster)
        statuses: dict[str, journal.PathStatus] = {}
        paths = [root / cluster / name for name in names]
        for path, status in zip(paths, journal.statuses(paths), strict=True):
            if status is not None and not status.trouble:
                statuses[path.name] = status
            elif status is not None and os.geteuid() == 0:
                _log.warning("%s is left out: %s", path, status.trouble)
        # Where users share a root, any user can link to any other's.
        links = {
            (status.target, status.uid): name.partition("_")[0]
            for name, status in statuses.items()
            if status.target and JOB.fullmatch(name)
        }
        for name, status in statuses.items():
            ours = status.is_directory and os.geteuid() in (0, status.uid)
            if ours and journal.JOURNAL_NAME.fullmatch(name):
                array = links.get((name, status.uid), journal.job_of(name))
                path = journal.job_directory(root, cluster, name)
                tasks = arrays.setdefault((cluster, array, status.uid), [])
                tasks.append((status.changed_s, path))
    # A directory changes with every check of its job: the files of only a few have to be read.
    newest = [
        _JobDirectory(*max((changed_s, array, path) for changed_s, path in tasks), len(tasks), uid)
        for (_, array, uid), tasks in arrays.items()
    ]
    return sorted(newest, key=lambda job: job.changed_s, reverse=True)[:count]


def _of_other_user(
    directory: _JobDirectory, work: Callable[[], LatestJob], spent_s: dict[int, float]
) -> LatestJob:
    """Return what `work` reads of another user's journal, for root: in a child with limits.

    `spent_s` sums the time by user, so that no user's journals hold up the list for long.
    """
    left_s = _USER_LIMIT_S - spent_s.get(directory.uid, 0.0)
    if left_s <= 0.0:
        why = f"user {directory.uid} has others that take too long to read"
        return directory.unread(f"its journal is not read: {why}")
    began_s = time.monotonic()
    try:
        data = read.within_limits(
            lambda: msgspec.msgpack.encode(work()),
            limit_s=left_s,
            memory_bytes=_MEMORY_BYTES,
            most_bytes=_ANSWER_BYTES,
        )
        return from_msgpack(data, LatestJob)
    except read.NotRead as err:
        return directory.unread(f"its journal is not read: {err}")
    finally:
        spent_s[directory.uid] = _USER_LIMIT_S - left_s + time.monotonic() - began_s


def _from_journal(
    directory: _JobDirectory, queue: Mapping[str, Sequence[ListedJob]], now_s: float
) -> LatestJob:
    path = directory.path
    try:
        runs = journal.runs_of(path.parent.parent, path.parent.name, path.name)
        if not runs:
            return directory.unread("its journal has no check")
        entries = [read.read_run(run, of_nodes=False) for run in runs]
        story = story_of(read.jobs_in(entries)[-1], now_s=now_s)
    except (OSError, JournalError) as err:
        return directory.unread(f"its journal cannot be read: {err}")
    queued = queue.get(directory.job, ())
    if directory.tasks > 1:
        latest = in_short(story, job=directory.job)
        counts = Counter(task.state.lower() for task in queued)
        state = ", ".join(f"{count} {name}" for name, count in counts.items())
        text = f"{directory.tasks} tasks checked; {story.job}: {latest.found}"
        return msgspec.structs.replace(latest, state=state or latest.state, found=text)
    latest = in_short(story)
    if len(queued) == 1 and not _id_is_reused(queued, latest):
        return msgspec.structs.replace(latest, state=queued[0].word)
    return latest
