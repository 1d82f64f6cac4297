# SPDX-License-Identifier: Apache-2.0
"""`slurm-health sweep`: check idle nodes with jobs that give way to others."""

from __future__ import annotations

import os
import time
from typing import Any

import click

from slurm_health.cli.history import open_index
from slurm_health.cli.options import age, number_option
from slurm_health.cli.output import print_lines
from slurm_health.preflight import config
from slurm_health.preflight.options import CHECK, JOURNAL, PYTHON, given_in_environ, with_options


@click.command()
@click.option("-p", "--partition", required=True, metavar="NAME", help="Check its nodes.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and submit nothing.")
@click.option(
    "--every",
    "every_s",
    metavar="AGE",
    default="7d",
    show_default=True,
    callback=age,
    help="Check a node again after so long: 12h, 7d, 4w.",
)
@number_option(
    "--share",
    0.001,
    0.5,
    "The share of its nodes to check at a time: at least three nodes, never all.",
    default=0.1,
    metavar="SHARE",
)
@number_option(
    "--time limit_min", 1, 1440, "The time limit of each check.", default=15, metavar="MINUTES"
)
@click.option(
    "--node",
    metavar="NODE",
    help="Check this node now, with two partners, unless it was checked in the last 6 h.",
)
@click.option("--avoid", metavar="NODELIST", help="With --node: no partners, as they are suspect.")
@with_options(CHECK, PYTHON, JOURNAL)
@click.argument("sbatch", nargs=-1, metavar="[-- SBATCH OPTIONS]")
def sweep(**options: Any) -> int:
    """Check idle nodes of a partition that no check has seen for a while, four at a time.

    One run, for cron: it submits a job for each group of nodes and ends. The jobs have the lowest
    priority; a QOS or partition that other jobs preempt goes after --, as in -- --qos=scavenger.
    Nodes that have never been in one check are put together first. The next run continues where
    this one stopped, and reports what became of its jobs; lemons and history print what was found.

    Exits 3 if jobs of earlier runs checked nothing, or their outcome cannot be recorded, and 4 if
    Slurm refuses a job.
    """
    from slurm_health.fleet.sweep import Sweep, SweepSettings
    from slurm_health.system.processes import own_command

    root = config.journal_root(options["journal"], os.environ)
    python = options["python"] or given_in_environ(os.environ, PYTHON).get("python")
    given = {"journal": str(root), "check": options["check"], "python": python}
    words = [f"--{name}={value}" for name, value in given.items() if value]
    settings = SweepSettings(
        check=own_command("check", *words),
        **{
            name: options[name]
            for name in ("partition", "share", "every_s", "limit_min", "sbatch", "dry_run")
        },
    )
    run = Sweep(settings, root, os.environ)
    with open_index(root) as index:
        if options["node"]:
            turn = run.check_node(index, options["node"], options["avoid"] or "", now_s=time.time())
        else:
            turn = run.run(index, now_s=time.time())
    print_lines(turn.lines)
    for note in turn.notes:
        click.echo(f"slurm-health: {note}", err=True)
    return turn.exit_code
