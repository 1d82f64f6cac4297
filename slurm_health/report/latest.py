# SPDX-License-Identifier: Apache-2.0
"""The caller's latest jobs: what their journals say, and Slurm's word where it answers."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurm_health import journal
from slurm_health.core.text import cut
from slurm_health.errors import JournalError, SlurmError
from slurm_health.report.build import job_report
from slurm_health.report.find import JOB, directories
from slurm_health.report.layout import Page
from slurm_health.report.model import JobReport
from slurm_health.report.phrases import NOTHING, found_text, left_texts, moment_text, outcome_texts
from slurm_health.report.read import read_run
from slurm_health.report.same_id import jobs_in
from slurm_health.slurm.client import Client
from slurm_health.slurm.parsing import ListedJob

# Slurm is asked about a list that can be printed without it.
_PATIENCE_S = 5.0
_MOST_SAID = 160  # of one job in the list: its own report says it all
_NOT_ENDED = frozenset({"PENDING", "RUNNING", "SUSPENDED", "CONFIGURING"})


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


class _Found(NamedTuple):
    """A job's newest directory, or that of an array's newest task."""

    changed_s: float
    array: str
    directory: Path
    tasks: int


def latest_jobs(
    root: Path, count: int, *, cluster: str | None, now_s: float, environ: Mapping[str, str]
) -> list[LatestJob]:
    """Return the caller's latest jobs, newest first: those that wait, and so many with a journal.

    Raises:
        JournalError: the directory of all journals cannot be read.
    """
    try:
        found = _newest(root, count, [cluster] if cluster else directories(root))
    except OSError as err:
        raise JournalError(root, f"cannot be read: {err.strerror or err}") from err
    listed = _asked(environ)
    jobs = [_from_journal(each, listed, now_s) for each in found]
    told = {job.job.partition("_")[0] for job in jobs if job.state}
    waiting = [
        LatestJob(
            job=each.job,
            script=each.name,
            nodes=each.nodes,
            state=each.word,
            found="not checked yet" if each.state == "PENDING" else "no journal",
        )
        for array, tasks in listed.items()
        for each in tasks
        if each.state in _NOT_ENDED and array not in told
    ]
    waiting.sort(key=lambda job: int(job.job.partition("_")[0]), reverse=True)
    return [*waiting[:count], *jobs]


def latest_text(
    jobs: Sequence[LatestJob], root: Path, *, width: int | None = None, unicode: bool = True
) -> str:
    """Return the jobs as a table, a row each.

    Args:
        jobs: what to show, newest first.
        root: where their journals are.
        width: columns of the terminal, None to break no line.
        unicode: whether the output can show more than ASCII.
    """
    page = Page(width=width, unicode=unicode)
    if not jobs:
        return "\n".join(
            page.paragraph(f"no jobs of yours under {root}, and Slurm names none that wait")
        )
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

    They are the caller's, or anybody's where the caller is root.
    """
    arrays: dict[tuple[str, str], list[Path]] = {}
    for cluster in clusters:
        names = [name for name in directories(root / cluster) if JOB.fullmatch(name)]
        array_of = {
            str(task.readlink()): task.name.partition("_")[0]
            for name in names
            if (task := root / cluster / name).is_symlink()
        }
        for name in names:
            path = journal.job_directory(root, cluster, name)
            if not path.is_symlink() and os.geteuid() in (0, path.lstat().st_uid):
                arrays.setdefault((cluster, array_of.get(name, name)), []).append(path)
    # A directory changes with each check of its job: only of a few are the files looked at.
    found = []
    for (_, array), paths in arrays.items():
        changed = sorted((path.lstat().st_mtime, path) for path in paths)
        found.append(_Found(changed[-1][0], array, changed[-1][1], len(paths)))
    return sorted(found, key=lambda job: job.changed_s, reverse=True)[:count]


def _from_journal(
    found: _Found, listed: Mapping[str, Sequence[ListedJob]], now_s: float
) -> LatestJob:
    job = found.directory
    cluster = job.parent.name
    try:
        runs = journal.runs_of(job.parent.parent, cluster, job.name)
        read = [read_run(run, of_nodes=False) for run in runs]
        report = job_report(jobs_in(read)[-1], now_s=now_s)
    except (OSError, JournalError, IndexError) as err:
        why = f"its journal cannot be read: {err}"
        return LatestJob(job=found.array, cluster=cluster, script="", started_s=None, found=why)
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
    """Return what the last check found, and which nodes the job has left behind."""
    last = report.runs[-1]
    parts = [found_text(last, names=True), *left_texts(report), *outcome_texts(last)]
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
    """Return the caller's jobs that Slurm knows, by their ids, an array's by that of the array."""
    listed: dict[str, list[ListedJob]] = {}
    client = Client(environ, patience_s=0, deadline_s=_PATIENCE_S)
    with contextlib.suppress(SlurmError):
        for each in client.jobs_of(os.geteuid()):
            listed.setdefault(each.job.partition("_")[0], []).append(each)
    return listed
