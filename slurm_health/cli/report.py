# SPDX-License-Identifier: Apache-2.0
"""`slurm-health report`: what the journal holds of a job, as a table, as JSON or as HTML."""

from __future__ import annotations

import gc
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import click

from slurm_health.cli.output import page_here, print_result
from slurm_health.cli.shared_options import as_settings
from slurm_health.preflight import config
from slurm_health.preflight.options import JOURNAL, with_options
from slurm_health.records.errors import (
    ExitCode,
    JournalError,
    PackageMissing,
    RunNotFound,
)
from slurm_health.report import export, find, jobs, read, slurm_now, text
from slurm_health.report.story import Story

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Which jobs are to be shown, how, and where their journals are."""

    job_ids: tuple[str, ...]
    journal: str | None
    cluster: str | None
    as_json: bool
    verbose: bool
    as_html: bool
    follow: bool
    last: int
    name: str | None

    @property
    def root(self) -> Path:
        return config.journal_root(self.journal, os.environ)

    @property
    def for_programs(self) -> bool:
        return self.as_json or self.as_html


@click.command(short_help="Print what was measured, concluded and done for a job.")
@click.argument("job_ids", metavar="[JOBID]...", nargs=-1)
@with_options(JOURNAL)
@click.option("--cluster", metavar="NAME", help="The cluster, where several share the journal.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--verbose", is_flag=True, help="Print all evidence, every round, and what could not be seen."
)
@click.option("--html", "as_html", is_flag=True, help="Print the report as one page of HTML.")
@click.option(
    "--follow", is_flag=True, help="Draw the report anew while the job runs, until it has ended."
)
@click.option(
    "--last",
    metavar="N",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Without JOBID: how many jobs to list.",
)
@click.option("--name", "-n", metavar="NAME", help="Without JOBID: jobs or scripts of this name.")
@as_settings(_Asked)
def report(asked: _Asked) -> int:
    """Print what was measured, concluded and done for a job, or for several.

    JOBID is a job id, or 12_3 for a task of an array. An array's own id, or 12_[1-4], lists its
    tasks. Without JOBID your latest jobs are listed. Reads the journal's files: any time later, on
    any machine that sees them. Slurm is asked about jobs that have none.
    """
    _refuse_what_does_not_go_together(asked)
    if asked.follow:
        from slurm_health.cli.follow import follow

        follow(asked.root, asked.job_ids[0], asked.cluster)
        return int(ExitCode.HEALTHY)
    gc.disable()  # nothing here is garbage before the end, and looking takes half of the time
    if not asked.job_ids:
        _list(asked)
    for number, job in enumerate(asked.job_ids):
        if number:
            print_result("\n")
        _show(job, asked)
    return int(ExitCode.HEALTHY)


def _refuse_what_does_not_go_together(asked: _Asked) -> None:
    if asked.name is not None and asked.job_ids:
        raise click.UsageError("--name lists jobs, and goes with no JOBID")
    if len(asked.job_ids) > 1 and (asked.for_programs or asked.follow):
        raise click.UsageError("--json, --html and --follow are about one job: name one JOBID")
    if not asked.job_ids and (asked.verbose or asked.as_html or asked.follow):
        raise click.UsageError("--html, --follow and --verbose need a job: name its JOBID")
    if sum((asked.as_json, asked.as_html, asked.follow, asked.verbose)) > 1:
        raise click.UsageError("--json, --html, --follow and --verbose: choose one")


def _list(asked: _Asked) -> None:
    """Print the caller's latest jobs, of one name where one is given."""
    name = asked.name or ""
    latest = jobs.latest_jobs(
        asked.root,
        asked.last,
        cluster=asked.cluster,
        now_s=time.time(),
        environ=os.environ,
        name=name,
    )
    called = f" called {name}" if name else ""
    pending = "Slurm lists none that are pending"
    if latest.unasked:
        pending = f"Slurm cannot be asked which are pending: {latest.unasked}"
    if latest.unasked and (latest.jobs or asked.as_json):  # else the text says it
        _log.warning("jobs that are pending may be missing: %s", latest.unasked)
    if asked.as_json or latest.jobs:
        _print_list(latest.jobs, asked, "slurm-health report JOB shows one.")
    else:
        _print(f"no jobs of yours{called} under {asked.root}, and {pending}")


def _print_list(listed: list[export.LatestJob], asked: _Asked, foot: str) -> None:
    if asked.as_json:
        print_result(export.as_json(export.ListDocument(jobs=listed)) + "\n")
    else:
        page = page_here()
        _print("\n".join([jobs.list_text(listed, page), "", *page.paragraph(foot)]))


def _show(job: str, asked: _Asked) -> None:
    """Print one job, or the tasks of an array."""
    now_s = time.time()
    try:
        tasks, stories, unread = _load(asked.root, job, asked.cluster)
    except RunNotFound as err:
        asks = find.JOB.fullmatch(job) and slurm_now.may_know(err, asked.cluster, os.environ)
        word = slurm_now.word(job, os.environ) if asks else None
        if asked.for_programs or word is None or not word.waits:
            raise
        _print(f"Job {job}: {word.text}")
        return
    if tasks:
        if asked.as_html:
            raise click.UsageError(f"--html is about one job: {', '.join(tasks[:5])}")
        others = {**unread, **_without_journal(job, tasks)}
        listed = [jobs.in_short(story) for story in stories]
        listed += [
            export.LatestJob(job=j, state="no journal", found=why) for j, why in others.items()
        ]
        foot = f"slurm-health report {stories[0].job} shows one task in full."
        _print_list(listed, asked, foot)
        return
    story = slurm_now.asked(stories[0], now_s=now_s, environ=os.environ)
    if asked.as_html:
        print_result(_page(story))
    elif asked.as_json:
        print_result(export.as_json(export.job_document(story)) + "\n")
    else:
        _print(text.job_text(story, page_here(), verbose=asked.verbose))


def _print(shown: str) -> None:
    print_result(shown.rstrip("\n") + "\n")


def _page(story: Story) -> str:
    """Return the page of a job.

    Raises:
        PackageMissing: jinja2, of the extra `html`, is not there.
    """
    try:
        from slurm_health.report.web_page import as_html
    except ModuleNotFoundError as err:
        raise PackageMissing("--html", str(err.name), "html") from err
    return as_html(story, made_at=time.strftime("%Y-%m-%d %H:%M %Z"))


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


def _without_journal(job: str, tasks: list[str]) -> dict[str, str]:
    """Return what Slurm knows of the array's other tasks."""
    array, wanted = find.tasks_asked_for(job)
    known = {int(task.rpartition("_")[2]) for task in tasks}
    missing = None if wanted is None else wanted - known
    return slurm_now.of_tasks(array, missing, os.environ)


def _why_no_journal(job: str) -> str:
    """Say what Slurm knows of a job, or of the tasks of an array, of which there is no journal."""
    array, wanted = find.tasks_asked_for(job)
    if wanted is None:
        return slurm_now.reason(job, os.environ)
    told = slurm_now.of_tasks(array, wanted, os.environ)
    known = (f"{tasks}: {why}" for tasks, why in told.items() if why != slurm_now.UNKNOWN)
    return " ".join(known)
