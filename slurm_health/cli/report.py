# SPDX-License-Identifier: Apache-2.0
"""`slurm-health report`: what the journal holds of a job, as a table or as JSON."""

from __future__ import annotations

import os
import time

import click

from slurm_health import config
from slurm_health.cli.shared_options import shared_options
from slurm_health.cli.terminal import print_result, terminal
from slurm_health.errors import ExitCode, RunNotFound
from slurm_health.options import Door
from slurm_health.report import elsewhere, export, find, table, without_journal


@click.command(short_help="Print what was measured, concluded and done for a job.")
@click.argument("job", metavar="JOBID")
@shared_options(Door.CHECK, "journal")
@click.option("--cluster", metavar="NAME", help="The cluster, where several share the journal.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--raw", is_flag=True, help="With --json: include every raw sample.")
def report(job: str, journal: str | None, cluster: str | None, as_json: bool, raw: bool) -> int:
    """Print what was measured, concluded and done for a job.

    JOBID is a job id, or 12_3 for a task of an array. An array's own id, or 12_[1-4], lists its
    tasks. Reads the journal's files: any time later, on any machine that sees them. Slurm is asked
    where there are none.
    """
    if raw and not as_json:
        raise click.UsageError("--raw goes with --json")
    root = config.journal_root(journal, os.environ)
    try:
        tasks = find.tasks_of(root, job, cluster)
        found = [
            find.load(root, each, cluster=cluster, now_s=time.time()) for each in tasks or [job]
        ]
    except RunNotFound as err:
        raise err.with_reason(elsewhere.of(root, job) or _why_no_journal(job)) from None
    others = _without_journal(job, tasks) if tasks else {}
    width, unicode = terminal()
    if as_json and tasks:
        print_result(export.tasks_as_json(found, others=others, raw=raw))
    elif as_json:
        print_result(export.as_json(*found, raw=raw))
    elif tasks:
        print_result(table.tasks_text(found, others=others, width=width, unicode=unicode) + "\n")
    else:
        print_result(table.job_text(*found, width=width, unicode=unicode).rstrip("\n") + "\n")
    return int(ExitCode.HEALTHY)


def _without_journal(job: str, tasks: list[str]) -> dict[str, str]:
    """Return what Slurm knows of the array's other tasks."""
    array, wanted = find.tasks_asked_for(job)
    known = {int(task.rpartition("_")[2]) for task in tasks}
    missing = None if wanted is None else wanted - known
    return without_journal.of_tasks(array, missing, os.environ)


def _why_no_journal(job: str) -> str:
    """Say what Slurm knows of a job, or of the tasks of an array, of which there is no journal."""
    array, wanted = find.tasks_asked_for(job)
    if wanted is None:
        return without_journal.reason(job, os.environ)
    told = without_journal.of_tasks(array, wanted, os.environ)
    known = (f"{tasks}: {why}" for tasks, why in told.items() if why != without_journal.UNKNOWN)
    return " ".join(known)
