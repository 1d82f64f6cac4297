# SPDX-License-Identifier: Apache-2.0
"""`slurm-health clean`: remove old journals."""

from __future__ import annotations

import os
import sys
import time

import click

from slurm_health.cli.options import age
from slurm_health.cli.output import page_here, print_lines, print_result
from slurm_health.preflight import config
from slurm_health.preflight.options import JOURNAL, with_options
from slurm_health.records.errors import ExitCode
from slurm_health.records.text import counted
from slurm_health.report.layout import moment_text

_FEW = 5  # jobs that are named of those that stay


@click.command()
@click.option(
    "--older-than",
    "older_than_s",
    metavar="AGE",
    required=True,
    callback=age,
    help="Remove what was last written longer ago: 12h, 90d, 4w.",
)
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal.")
@with_options(JOURNAL)
def clean(older_than_s: float, dry_run: bool, yes: bool, journal: str | None) -> int:
    """Remove your old journals.

    The journal of a job that has not ended is never removed. Slurm is asked once which those are;
    if it cannot be asked, what was written within 60 days stays. A journal's report and its part
    of the history go with it.
    """
    if not (dry_run or yes or sys.stdin.isatty()):
        raise click.UsageError(
            "no terminal to ask on: give --yes, or --dry-run to see what would be removed"
        )
    from slurm_health.fleet import clean as cleaning
    from slurm_health.preflight.master.run_check import LOCAL_CLUSTER

    root = config.journal_root(journal, os.environ)
    own = cleaning.journals(root)
    running = cleaning.running_jobs(os.environ) if own else cleaning.RunningJobs()
    go, stay = cleaning.choose(
        own, running, local=LOCAL_CLUSTER, now_s=time.time(), older_than_s=older_than_s
    )
    page = page_here()
    notes = page.paragraph(f"slurm-health: {running.why_not}") if stay and running.why_not else []
    for why, journals in stay.items():
        jobs = ", ".join(one.job for one in journals[:_FEW])
        more = f" and {len(journals) - _FEW} more" if len(journals) > _FEW else ""
        notes += page.paragraph(f"slurm-health: left, because {why}: job {jobs}{more}")
    click.echo("".join(f"{line}\n" for line in notes), err=True, nl=False)
    if dry_run and go:
        rows = [("JOB", "SIZE", "LAST WRITTEN", "CLUSTER")]
        for one in go:
            size = cleaning.size_text(one.size_bytes)
            rows.append((one.job, size, moment_text(one.written_s), one.cluster))
        lines = page.table(rows, align=("right", "right", "left"))
        print_lines(lines)
    all_bytes = cleaning.size_text(sum(one.size_bytes for one in own))
    there = counted(len(own), "journal")
    if not go:
        print_result(f"nothing to remove: {there}, {all_bytes}\n")
    else:
        going_bytes = cleaning.size_text(sum(one.size_bytes for one in go))
        print_result(f"{len(go)} of {there}, {going_bytes} of {all_bytes}\n")
    if dry_run:
        return ExitCode.HEALTHY
    what = "this journal" if len(go) == 1 else f"these {len(go)} journals"
    if go and not yes and not click.confirm(f"Remove {what}? (--dry-run lists them)", err=True):
        click.echo("slurm-health: nothing was removed", err=True)
        return ExitCode.HEALTHY
    failed = False
    for one in go:
        try:
            why = cleaning.remove(root, one)
        except OSError as err:
            failed = True
            why = f"it could not be removed: {err.strerror or err}"
        if why:
            click.echo(f"slurm-health: job {one.job} is left: {why}", err=True)
    cleaning.remove_leftovers(root, go)
    return ExitCode.UNAVAILABLE if failed else ExitCode.HEALTHY
