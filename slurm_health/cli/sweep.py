# SPDX-License-Identifier: Apache-2.0
"""`slurm-health sweep`: check idle nodes with jobs that give way to others."""

from __future__ import annotations

import os
import time

import click

from slurm_health import config
from slurm_health.cli.clean import read_age, reading
from slurm_health.cli.history import opened_index
from slurm_health.cli.shared_options import shared_options
from slurm_health.cli.terminal import print_result
from slurm_health.errors import ExitCode, SlurmError
from slurm_health.options import Door


@click.command(short_help="Check idle nodes, a few at a time.")
@click.option("-p", "--partition", required=True, metavar="NAME", help="Whose nodes.")
@click.option(
    "--share",
    type=click.FloatRange(min=0, max=0.5, min_open=True),
    default=0.1,
    show_default=True,
    help="Of the partition's nodes, so many at one time; three at least, and never all.",
)
@click.option(
    "--size",
    type=click.IntRange(min=3, max=64),
    default=4,
    show_default=True,
    help="Nodes that are checked together.",
)
@click.option(
    "--every",
    "every_s",
    metavar="AGE",
    default="7d",
    show_default=True,
    callback=reading(read_age),
    help="Check a node again after this: 12h, 7d, 4w.",
)
@click.option(
    "--time",
    "limit_min",
    metavar="MINUTES",
    type=click.IntRange(min=1, max=1440),
    default=15,
    show_default=True,
    help="The time limit of each check.",
)
@shared_options(Door.CHECK, "check", "python", "journal")
@click.option("--index", metavar="FILE|URL", help="The index of the journals, as of history.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and submit nothing.")
@click.argument("sbatch", nargs=-1, metavar="[-- SBATCH OPTIONS]")
def sweep(
    partition: str,
    share: float,
    size: int,
    every_s: float,
    limit_min: int,
    check: str | None,
    python: str | None,
    journal: str | None,
    index: str | None,
    dry_run: bool,
    sbatch: tuple[str, ...],
) -> int:
    """Check idle nodes of a partition that no check has seen for a while, a few at a time.

    One turn, for cron: it submits a job for each group of nodes and ends. The jobs have the lowest
    priority; name a QOS or partition that others preempt behind --, as: -- --qos=scavenger. Nodes
    that have never been in one check are put together first. The next turn goes on where this one
    stopped; slurm-health lemons and history say what was found.
    """
    from slurm_health.core.nodeset import fold
    from slurm_health.processes import own_command
    from slurm_health.slurm.client import Client
    from slurm_health.sweep import turn

    root = config.journal_root(journal, os.environ)
    given = {"journal": str(root), "check": check, "python": python}
    words = own_command("check", *(f"--{name}={text}" for name, text in given.items() if text))
    wishes = turn.Wishes(
        partition=partition,
        share=share,
        size=size,
        every_s=every_s,
        limit_min=limit_min,
        check=words,
        sbatch=sbatch,
    )
    client = Client(os.environ, patience_s=0)
    with opened_index(str(root), index, rebuild=False) as found:
        chosen = turn.choose(client, found, wishes, uid=os.geteuid(), now_s=time.time())
    if dry_run:
        for group in chosen.groups:
            print_result(f"sbatch {' '.join(turn.options(group, wishes))}\n")
    failed: SlurmError | None = None
    for group in () if dry_run else chosen.groups:
        try:
            job = turn.submit(client, group, wishes, os.environ)
        except SlurmError as err:  # a group that Slurm refuses must not keep the others from it
            click.echo(f"slurm-health: {fold(group)} is not checked: {err}", err=True)
            failed = err
        else:
            print_result(f"{job}  {fold(group)}\n")
    click.echo(
        f"slurm-health: {chosen.due} of {chosen.idle} idle nodes are due; at most {chosen.most} of"
        f" {partition} at one time, {chosen.in_checks} are in checks already",
        err=True,
    )
    return int(ExitCode.UNAVAILABLE if failed else ExitCode.HEALTHY)
