# SPDX-License-Identifier: Apache-2.0
"""`slurm-health report`: what the journal holds of a job, as a table, as JSON or as HTML."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from slurm_health.cli.options import number_option
from slurm_health.cli.output import page_here, print_lines, print_result
from slurm_health.preflight import config
from slurm_health.preflight.options import JOURNAL, with_options
from slurm_health.records.errors import ExitCode, JournalError, PackageMissing, RunNotFound
from slurm_health.report import export, find, jobs, read, slurm_now, text
from slurm_health.report.story import Story

_F = TypeVar("_F", bound=Callable[..., Any])
_log = logging.getLogger(__name__)
_TEXT, _VERBOSE, _JSON, _HTML, _FOLLOW = "", "--verbose", "--json", "--html", "--follow"


def _form(flag: str, text: str) -> Callable[[_F], _F]:
    """Return an option that chooses how jobs are shown; the last one counts."""
    return click.option(flag, "form", flag_value=flag, default=_TEXT, help=text)


@click.command()
@click.argument("job_ids", metavar="[JOBID]...", nargs=-1)
@click.option("-n", "--name", metavar="NAME", help="Without JOBID: jobs of this name.")
@number_option("--last", 1, 10_000, "Without JOBID: how many jobs to list.", default=10)
@_form(_FOLLOW, "Draw the report anew until the job has ended.")
@_form(_VERBOSE, "Print the evidence, every round, what was not seen.")
@_form(_JSON, "Print JSON.")
@_form(_HTML, "Print one page of HTML.")
@click.option("--cluster", metavar="NAME", help="The cluster, if several share the journal.")
@with_options(JOURNAL)
def report(
    job_ids: tuple[str, ...],
    name: str | None,
    last: int,
    cluster: str | None,
    journal: str | None,
    form: str,
) -> int:
    """Print what was measured, concluded and done for a job, or for several.

    JOBID is a job id, or 12_3 for a task of an array. An array's own id, or 12_[1-4], lists its
    tasks. Without JOBID your latest jobs are listed. Reads the journal's files: any time later, on
    any machine that sees them. Slurm is asked about jobs that have none.
    """
    if name is not None and job_ids:
        raise click.UsageError("--name lists jobs, and goes with no JOBID")
    if len(job_ids) > 1 and form in {_JSON, _HTML, _FOLLOW}:
        raise click.UsageError(f"{form} is about one job: name one JOBID")
    if not job_ids and form in {_VERBOSE, _HTML, _FOLLOW}:
        raise click.UsageError(f"{form} needs a job: name its JOBID")
    root = config.journal_root(journal, os.environ)
    if form == _FOLLOW:
        from slurm_health.cli.follow import follow

        follow(root, job_ids[0], cluster)
        return ExitCode.HEALTHY
    gc.disable()  # nothing here is garbage before the end, and looking takes half of the time
    if not job_ids:
        _list(root, name or "", last, cluster, form)
    for position, job in enumerate(job_ids):
        if position:
            print_result("\n")
        _show(root, job, cluster, form)
    return ExitCode.HEALTHY


def _list(root: Path, name: str, last: int, cluster: str | None, form: str) -> None:
    """Print the caller's latest jobs, of one name if one is given."""
    latest = jobs.latest_jobs(
        root, last, cluster=cluster, now_s=time.time(), environ=os.environ, name=name
    )
    if latest.jobs or form == _JSON:
        foot = "slurm-health report JOB shows one."
        if latest.unasked and form == _JSON:
            _log.warning("jobs that are pending may be missing: %s", latest.unasked)
        elif latest.unasked:
            foot += f" Jobs that are pending may be missing: {latest.unasked}."
        _print_list(latest.jobs, foot, form)
        return
    pending = "Slurm lists none that are pending"
    if latest.unasked:
        pending = f"Slurm cannot be asked which are pending: {latest.unasked}"
    called = f" called {name}" if name else ""
    print_lines(page_here().paragraph(f"no jobs of yours{called} under {root}, and {pending}"))


def _print_list(listed: list[export.LatestJob], foot: str, form: str) -> None:
    if form == _JSON:
        _print(export.as_json(export.ListDocument(jobs=listed)))
    else:
        page = page_here()
        _print("\n".join([jobs.list_text(listed, page), "", *page.paragraph(foot)]))


def _show(root: Path, job: str, cluster: str | None, form: str) -> None:
    """Print one job, or the tasks of an array."""
    try:
        tasks, stories, unread = _load(root, job, cluster)
    except RunNotFound as err:
        asks = find.JOB.fullmatch(job) and slurm_now.may_know(err, cluster, os.environ)
        word = slurm_now.word(job, os.environ) if asks else None
        if form in {_JSON, _HTML} or word is None or not word.waits:
            raise
        _print(f"Job {job}: {word.text}")
        return
    if tasks:
        if form == _HTML:
            raise click.UsageError(f"--html is about one job: {', '.join(tasks[:5])}")
        array, wanted = find.tasks_asked_for(job)
        known = {int(task.rpartition("_")[2]) for task in tasks}
        missing = None if wanted is None else wanted - known
        others = {**unread, **slurm_now.of_tasks(array, missing, os.environ)}
        listed = [jobs.in_short(story) for story in stories]
        listed += [
            export.LatestJob(job=task, state="no journal", found=why)
            for task, why in others.items()
        ]
        foot = f"slurm-health report {stories[0].job} shows one task in full."
        _print_list(listed, foot, form)
        return
    story = slurm_now.asked(stories[0], now_s=time.time(), environ=os.environ)
    if form == _JSON:
        _print(export.as_json(export.job_document(story)))
    elif form == _HTML:
        try:
            from slurm_health.report.web_page import as_html
        except ModuleNotFoundError as err:
            raise PackageMissing("--html", str(err.name), "html") from err
        print_result(as_html(story, made_at=time.strftime("%Y-%m-%d %H:%M %Z")))
    else:
        _print(text.job_text(story, page_here(), verbose=form == _VERBOSE))


def _print(shown: str) -> None:
    print_result(shown.rstrip("\n") + "\n")


def _load(
    root: Path, job: str, cluster: str | None
) -> tuple[list[str], list[Story], dict[str, str]]:
    """Return the tasks that an array's id stands for, none for one job, and the stories.

    Of an array also why the journals of some tasks cannot be read, if those of others can.
    """
    stories: list[Story] = []
    failed: dict[str, JournalError | RunNotFound] = {}
    try:
        tasks = find.tasks_of(root, job, cluster)
        for task in tasks or [job]:
            try:
                stories.append(read.load(root, task, cluster=cluster, now_s=time.time()))
            except (JournalError, RunNotFound) as err:
                failed[task] = err
        if not stories:
            raise next(iter(failed.values()))
    except RunNotFound as err:
        if not slurm_now.may_know(err, cluster, os.environ):
            raise
        raise err.with_reason(find.elsewhere_text(root, job) or _why_no_journal(job)) from None
    unread = {
        task: slurm_now.UNKNOWN if isinstance(err, RunNotFound) else str(err)
        for task, err in failed.items()
    }
    return tasks, stories, unread


def _why_no_journal(job: str) -> str:
    """Return what Slurm knows of a job, or of the tasks of an array, without a journal."""
    array, wanted = find.tasks_asked_for(job)
    if wanted is None:
        return slurm_now.reason(job, os.environ)
    tasks = slurm_now.of_tasks(array, wanted, os.environ)
    return " ".join(f"{task}: {why}" for task, why in tasks.items() if why != slurm_now.UNKNOWN)
