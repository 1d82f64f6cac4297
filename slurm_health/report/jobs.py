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
# Slurm is asked about a list that can be printed without it.
_PATIENCE_S = 5.0
_LOOKED_AT = 200  # for those of a name
# What reading other users' journals may take: one's job, and all of one user's together.
_MEMORY_BYTES = 2 << 30
_ANSWER_BYTES = 1 << 20
_MOST_OF_A_USER_S = 15.0
_NOT_STARTED = frozenset({"PENDING", "CONFIGURING"})
_NAME, _STATE = 16, 11  # columns at most
_LEAST_FOUND = 20


class LatestJobs(NamedTuple):
    """Jobs, newest first, and why Slurm could not be asked which are pending; empty if it was.

    Without its answer jobs without a journal are missing.
    """

    jobs: list[LatestJob]
    unasked: str = ""


class _Found(NamedTuple):
    """A job's newest directory, or that of an array's newest task."""

    changed_s: float
    array: str
    directory: Path
    tasks: int
    uid: int


def in_short(story: Story, *, job: str = "", state: str = "") -> LatestJob:
    """Return a job as a line of a list; `state` is Slurm's word on it, empty if it gives none."""
    summary, started = summary_of(story), story.last.started
    worth = (Severity.ERROR, Severity.WARNING, Severity.UNDECIDED)
    bad = [finding.what for finding in summary.found if finding.severity in worth]
    shown = [summary.headline.what, *(what for what in bad if what not in summary.headline.what)]
    began_s = story.last.started_s
    return LatestJob(
        job=job or story.job,
        state=state or summary.outcome,
        found="; ".join(shown),
        severity=summary.headline.severity,
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
        age = (
            NOTHING
            if job.age_s is None
            else duration_text(60 * (job.age_s // 60) if job.age_s >= 120 else job.age_s)
        )
        number = f"{job.job} {job.cluster}" if several else job.job
        name = cut(job.name or job.script or NOTHING, _NAME)
        cells.append(
            [number, name, cut(job.state, _STATE), age if job.age_s is not None else NOTHING]
        )
    beside = sum(max(len(row[n]) for row in cells) + 2 for n in range(4))
    rows: list[list[str | Tinted]] = [[*cells[0][:3], "VERDICT", "AGE"]]
    for row, job in zip(cells[1:], jobs, strict=True):
        room = max(_LEAST_FOUND, page.width - beside) if page.width else len(job.found)
        found = Tinted(cut(one_line(job.found), room), Severity(job.severity), room)
        rows.append([*row[:3], found, row[3]])
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
    """Return the caller's latest jobs, newest first: those that wait, and so many with a journal.

    With a `name` they are those whose job or script is called so, of the latest `_LOOKED_AT`.

    Raises:
        JournalError: the directory of all journals cannot be read.
    """
    try:
        most = max(count, _LOOKED_AT) if name else count
        found = _newest(root, most, [cluster] if cluster else journal.clusters_in(root))
    except OSError as err:
        raise JournalError(root, f"cannot be read: {err.strerror or err}") from err
    listed: dict[str, list[ListedJob]] = {}
    unasked = ""
    try:
        client = Client(environ, patience_s=0, deadline_s=_PATIENCE_S)
        for job in client.jobs_of(os.geteuid()):
            listed.setdefault(job.whole, []).append(job)
    except SlurmError as err:
        unasked = err.in_short
    readers = _Others()
    jobs = [readers.read(each, partial(_from_journal, each, listed, now_s)) for each in found]
    known = {job.job.partition("_")[0] for job in jobs if job.job.partition("_")[0] in listed}
    new = {job.job for job in jobs if job.job in listed and _again(listed[job.job], job)}
    waiting = [
        LatestJob(
            job=task.job,
            name=task.name,
            nodes=task.nodes,
            state=task.word,
            age_s=max(0.0, now_s - task.submitted_s),
            found="not checked yet" if task.state in _NOT_STARTED else "no journal",
        )
        for array, tasks in sorted(listed.items(), key=lambda job: int(job[0]), reverse=True)
        for task in tasks
        if not task.ended and array not in known - new
    ]
    if name:
        waiting, jobs = ([j for j in of if name in (j.name, j.script)] for of in (waiting, jobs))
    return LatestJobs([*waiting[:count], *jobs[:count]], unasked)


def _again(said: Sequence[ListedJob], job: LatestJob) -> bool:
    """Say whether Slurm has given the id of a checked job again, to one that never started."""
    return (
        len(said) == 1
        and said[0].restarts == 0
        and job.started_s is not None
        and said[0].submitted_s > job.started_s
    )


def _newest(root: Path, count: int, clusters: Sequence[str]) -> list[_Found]:
    """Return the jobs that were checked last, newest first; an array is one of them.

    They are the caller's, or all users' if the caller is root.
    """
    arrays: dict[tuple[str, str, int], list[tuple[float, Path]]] = {}
    for cluster in clusters:
        looks = _statuses(root / cluster)
        # Where users share a root, any user can link to any other's.
        links = {
            (look.target, look.uid): name.partition("_")[0]
            for name, look in looks.items()
            if look.target and JOB.fullmatch(name)
        }
        for name, look in looks.items():
            ours = look.is_directory and os.geteuid() in (0, look.uid)
            if ours and journal.JOURNAL_NAME.fullmatch(name):
                array = links.get((name, look.uid), journal.job_of(name))
                path = journal.job_directory(root, cluster, name)
                of_array = arrays.setdefault((cluster, array, look.uid), [])
                of_array.append((look.changed_s, path))
    # A directory changes with each check of its job: only of a few are the files read.
    newest = [
        _Found(*max((changed_s, array, path) for changed_s, path in paths), len(paths), uid)
        for (_, array, uid), paths in arrays.items()
    ]
    return sorted(newest, key=lambda job: job.changed_s, reverse=True)[:count]


def _statuses(cluster: Path) -> dict[str, journal.PathStatus]:
    """Return what is in a cluster's directory; root is told what does not say what it is."""
    names = directories(cluster)
    looks: dict[str, journal.PathStatus] = {}
    for name, look in zip(names, journal.statuses([cluster / each for each in names]), strict=True):
        if look is not None and not look.trouble:
            looks[name] = look
        elif look is not None and os.geteuid() == 0:
            _log.warning("%s is left out: %s", cluster / name, look.trouble)
    return looks


class _Others:
    """Reads the journals of other users, for root, each in a child with limits.

    A journal that takes long to read holds up the list for a limited time, and no longer.
    """

    def __init__(self) -> None:
        self._spent_s: dict[int, float] = {}

    def read(self, found: _Found, work: Callable[[], LatestJob]) -> LatestJob:
        """Return what a job's journal says; why not, if that is another's beyond limits."""
        if found.uid == os.geteuid():
            return work()
        left_s = _MOST_OF_A_USER_S - self._spent_s.get(found.uid, 0.0)
        why = f"user {found.uid} has others that take too long to read"
        began_s = time.monotonic()
        try:
            if left_s > 0.0:
                data = read.within_limits(
                    lambda: msgspec.msgpack.encode(work()),
                    limit_s=left_s,
                    memory_bytes=_MEMORY_BYTES,
                    most_bytes=_ANSWER_BYTES,
                )
                return from_msgpack(data, LatestJob)
        except read.NotRead as err:
            why = str(err)
        finally:
            self._spent_s[found.uid] = _MOST_OF_A_USER_S - left_s + time.monotonic() - began_s
        return _unread(found, f"its journal is not read: {why}")


def _unread(found: _Found, why: str) -> LatestJob:
    cluster = found.directory.parent.name
    return LatestJob(job=found.array, cluster=cluster, state="unknown", found=why)


def _from_journal(
    found: _Found, listed: Mapping[str, Sequence[ListedJob]], now_s: float
) -> LatestJob:
    job = found.directory
    try:
        runs = journal.runs_of(job.parent.parent, job.parent.name, job.name)
        if not runs:
            return _unread(found, "its journal has no check")
        entries = [read.read_run(run, of_nodes=False) for run in runs]
        story = story_of(read.jobs_in(entries)[-1], now_s=now_s)
    except (OSError, JournalError) as err:
        return _unread(found, f"its journal cannot be read: {err}")
    array = found.array if found.tasks > 1 else ""
    latest = in_short(story, job=array)
    said = listed.get(found.array, ())
    if array:
        counts = Counter(task.state.lower() for task in said)
        state = ", ".join(f"{count} {name}" for name, count in counts.items())
        shown = f"{found.tasks} tasks checked; {story.job}: {latest.found}"
        return msgspec.structs.replace(latest, state=state or latest.state, found=shown)
    if len(said) == 1 and not _again(said, latest):
        return msgspec.structs.replace(latest, state=said[0].word)
    return latest
