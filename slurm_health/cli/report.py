# SPDX-License-Identifier: Apache-2.0
"""`slurm-health report`: what the journal holds of a job, as a table or as JSON."""

from __future__ import annotations

import os
import time

import click

from slurm_health import config
from slurm_health.cli.shared_options import shared_options
from slurm_health.cli.terminal import print_result, terminal
from slurm_health.errors import ExitCode
from slurm_health.options import Door
from slurm_health.report import export, find, table


@click.command(short_help="Print what was measured, concluded and done for a job.")
@click.argument("job", metavar="JOBID")
@shared_options(Door.CHECK, "journal")
@click.option("--cluster", metavar="NAME", help="The cluster, where several share the journal.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--raw", is_flag=True, help="With --json: include every raw sample.")
def report(job: str, journal: str | None, cluster: str | None, as_json: bool, raw: bool) -> int:
    """Print what was measured, concluded and done for a job.

    JOBID is a job id, or 12_3 for a task of an array. Reads the journal's files alone: any time
    later, on any machine that sees them.
    """
    if raw and not as_json:
        raise click.UsageError("--raw goes with --json")
    root = config.journal_root(journal, os.environ)
    found = find.load(root, job, cluster=cluster, now_s=time.time())
    if as_json:
        print_result(export.as_json(found, raw=raw))
    else:
        width, unicode = terminal()
        print_result(table.job_text(found, width=width, unicode=unicode).rstrip("\n") + "\n")
    return int(ExitCode.HEALTHY)
