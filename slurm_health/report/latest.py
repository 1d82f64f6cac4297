# SPDX-License-Identifier: Apache-2.0
"""The caller's latest jobs: what their journals say, and Slurm's word where it answers."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from slurm_health.records.decoding import from_msgpack
from slurm_health.records.errors import JournalError, SlurmError
from slurm_health.records.text import cut
from slurm_health.report import read
from slurm_health.report.build import job_report
from slurm_health.report.find import JOB, directories
from slurm_health.report.layout import NOTHING, Page
from slurm_health.report.model import JobReport
from slurm_health.report.phrases import found_text, left_texts, moment_text, outcome_texts
from slurm_health.report.read import jobs_in, read_run
from slurm_health.report.summary import why_in_short
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import ListedJob

_log = logging.getLogger(__name__)
# Slurm is asked about a list that can be printed without it.
_PATIENCE_S = 5.0
_LOOKED_AT = 200  # for those of a name
_MOST_SAID = 160  # of one job in the list: its own report says it all
# What reading other users' journals may take: one's job, and all of one user's together.
_MEMORY_BYTES = 2 << 30
_ANSWER_BYTES = 1 << 20
_MOST_OF_A_USER_S = 15.0
_NOT_STARTED = frozenset({"PENDING", "CONFIGURING"})


@dataclass(frozen=True, kw_only=True)
class LatestJob:
    """One job: its last check in short, and what Slurm says of it now.

    `started_s` is None where no check has begun, `nodes` counts those of the last check, `state`
    is empty where Slurm does not know the job, or does not answer.
    """

    job: str
    found: str
    cluster: str = ""
    script: str = ""
    started_s: float | None = None
    nodes: int = 0
    attempts: int = 0
    state: str = ""


class LatestJobs(NamedTuple):
    """Jobs, newest first, and why Slurm could not be asked which are pending; empty where it was.

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

    With a `name` they are those whose script or job is called so, of the latest `_LOOKED_AT`.

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
        listed = _asked(environ)
    except SlurmError as err:
        unasked = err.in_short
    readers = _Others()
    jobs = [readers.read(each, partial(_from_journal, each, listed, now_s)) for each in found]
    told = {job.job.partition("_")[0] for job in jobs if job.state}
    waiting = [
        LatestJob(
            job=each.job,
            script=each.name,
            nodes=each.nodes,
            state=each.word,
            found="not checked yet" if each.state in _NOT_STARTED else "no journal",
        )
        for array, tasks in sorted(listed.items(), key=lambda job: int(job[0]), reverse=True)
        for each in tasks
        if not each.ended and array not in told
    ]
    if name:
        waiting, jobs = ([j for j in each if j.script == name] for each in (waiting, jobs))
    return LatestJobs([*waiting[:count], *jobs[:count]], unasked)


def latest_text(
    latest: LatestJobs,
    root: Path,
    *,
    name: str = "",
    width: int | None = None,
    unicode: bool = True,
) -> str:
    """Return the jobs as a table, a row each.

    Args:
        latest: what to show.
        root: where their journals are.
        name: what they were asked for by, empty for all.
        width: columns of the terminal, None to break no line.
        unicode: whether the output can show more than ASCII.
    """
    page, jobs = Page(width=width, unicode=unicode), latest.jobs
    if not jobs:
        called = f" called {name}" if name else ""
        pending = "Slurm lists none that are pending"
        if latest.unasked:
            pending = f"Slurm cannot be asked which are pending: {latest.unasked}"
        return "\n".join(page.paragraph(f"no jobs of yours{called} under {root}, and {pending}"))
    several = len({job.cluster for job in jobs if job.cluster}) > 1
    rows = [["JOB", "SCRIPT", "CHECKED", "NODES", "STATE", "LAST CHECK"]]
    rows += [
        [
            f"{job.job} {job.cluster}" if several else job.job,
            job.script or NOTHING,
            moment_text(job.started_s),
            str(job.nodes or NOTHING),
            job.state or NOTHING,
            job.found,
        ]
        for job in jobs
    ]
    return "\n".join([*page.table(rows), "", *page.paragraph("slurm-health report JOB shows one.")])


def _newest(root: Path, count: int, clusters: Sequence[str]) -> list[_Found]:
    """Return the jobs that were checked last, newest first; an array is one of them.

    They are the caller's, or all users' where the caller is root.
    """
    arrays: dict[tuple[str, str, int], list[tuple[float, Path]]] = {}
    for cluster in clusters:
        looks = _looked_at(root / cluster)
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
    # A directory changes with each check of its job: only of a few are the files looked at.
    newest = [
        _Found(*max((changed_s, array, path) for changed_s, path in paths), len(paths), uid)
        for (_, array, uid), paths in arrays.items()
    ]
    return sorted(newest, key=lambda job: job.changed_s, reverse=True)[:count]


def _looked_at(cluster: Path) -> dict[str, journal.PathStatus]:
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
        """Return what a job's journal says; why not, where that is another's beyond limits."""
        if found.uid == os.geteuid():
            return work()
        left_s = _MOST_OF_A_USER_S - self._spent_s.get(found.uid, 0.0)
        why = f"user {found.uid} has others that take too long to read"
        if left_s > 0.0:
            began_s = time.monotonic()
            try:
                return self._read(work, left_s)
            except read.NotRead as err:
                why = str(err)
            finally:
                self._spent_s[found.uid] = _MOST_OF_A_USER_S - left_s + time.monotonic() - began_s
        why = f"its journal is not read: {why}"
        return LatestJob(job=found.array, cluster=found.directory.parent.name, found=why)

    @staticmethod
    def _read(work: Callable[[], LatestJob], limit_s: float) -> LatestJob:
        data = read.within_limits(
            lambda: msgspec.msgpack.encode(work()),
            limit_s=limit_s,
            memory_bytes=_MEMORY_BYTES,
            most_bytes=_ANSWER_BYTES,
        )
        return from_msgpack(data, LatestJob)


def _from_journal(
    found: _Found, listed: Mapping[str, Sequence[ListedJob]], now_s: float
) -> LatestJob:
    job = found.directory
    cluster = job.parent.name
    try:
        runs = journal.runs_of(job.parent.parent, cluster, job.name)
        if not runs:
            return LatestJob(job=found.array, cluster=cluster, found="its journal has no check")
        left = [read_run(run, of_nodes=False) for run in runs]
        report = job_report(jobs_in(left)[-1], now_s=now_s)
    except (OSError, JournalError) as err:
        why = f"its journal cannot be read: {err}"
        return LatestJob(job=found.array, cluster=cluster, found=why)
    last, started = report.runs[-1], report.runs[-1].started
    said = [
        each for each in listed.get(found.array, ()) if not _is_another(each, found, last.started_s)
    ]
    tasks = f"{found.tasks} tasks checked; {report.job}: " if found.tasks > 1 else ""
    return LatestJob(
        job=found.array if found.tasks > 1 else report.job,
        cluster=report.cluster,
        script=report.script,
        started_s=last.started_s,
        nodes=len(started.nodes) if started else 0,
        attempts=len({run.attempt for run in report.runs}),
        state=_states(said),
        found=tasks + _in_short(report),
    )


def _in_short(report: JobReport) -> str:
    """Return why the script failed, what the last check found, and which nodes the job has left."""
    last = report.runs[-1]
    parts = [
        *why_in_short(report),
        found_text(last, names=True),
        *left_texts(report),
        *outcome_texts(last),
    ]
    return cut(", ".join(part for part in parts if part), _MOST_SAID)


def _is_another(said: ListedJob, found: _Found, started_s: float | None) -> bool:
    """Tell whether Slurm has given the id of a checked job again, to one that was never started."""
    return (
        found.tasks == 1
        and said.restarts == 0
        and started_s is not None
        and said.submitted_s > started_s
    )


def _states(said: Sequence[ListedJob]) -> str:
    """Return the state of a job, or how many tasks of an array are in which."""
    if len(said) == 1:
        return said[0].word
    counts = Counter(each.state.lower() for each in said)
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _asked(environ: Mapping[str, str]) -> dict[str, list[ListedJob]]:
    """Return the caller's jobs that Slurm knows, each by the id of the whole array or job.

    Raises:
        SlurmError: Slurm does not answer.
    """
    listed: dict[str, list[ListedJob]] = {}
    client = Client(environ, patience_s=0, deadline_s=_PATIENCE_S)
    for each in client.jobs_of(os.geteuid()):
        listed.setdefault(each.whole, []).append(each)
    return listed
