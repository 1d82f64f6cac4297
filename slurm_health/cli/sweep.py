# SPDX-License-Identifier: Apache-2.0
"""`slurm-health sweep`: check idle nodes with jobs that give way to others."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_health.cli.clean import read_age, reading
from slurm_health.cli.history import opened_index
from slurm_health.cli.output import print_result
from slurm_health.cli.shared_options import as_settings
from slurm_health.fleet.sweep.choice import FEWEST
from slurm_health.preflight import config
from slurm_health.preflight.options import CHECK, JOURNAL, PYTHON, given_in_environ, with_options
from slurm_health.records.errors import ExitCode, SlurmError, UsageError

if TYPE_CHECKING:
    from slurm_health.fleet.sweep.submission import Turn, Wishes
    from slurm_health.system.slurm.client import Client

# Where jobs write whose words cannot be kept.
_UNTOLD = "/dev/null"


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Whose nodes are to be checked, and with what."""

    partition: str
    share: float
    size: int
    every_s: float
    limit_min: int
    check: str | None
    python: str | None
    journal: str | None
    index: str | None
    node: str | None
    avoid: str | None
    dry_run: bool
    sbatch: tuple[str, ...]


@click.command(short_help="Check idle nodes, a few at a time.")
@click.option(
    "-p",
    "--partition",
    required=True,
    metavar="NAME",
    help="The partition whose nodes are checked.",
)
@click.option(
    "--share",
    metavar="SHARE",
    type=click.FloatRange(min=0, max=0.5, min_open=True),
    default=0.1,
    show_default=True,
    help="The share of its nodes that is checked at a time: at least three nodes, and never all.",
)
@click.option(
    "--size",
    metavar="N",
    type=click.IntRange(min=3, max=64),
    default=4,
    show_default=True,
    help="How many nodes are checked together.",
)
@click.option(
    "--every",
    "every_s",
    metavar="AGE",
    default="7d",
    show_default=True,
    callback=reading(read_age),
    help="Check a node again after so long: 12h, 7d, 4w.",
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
@with_options(CHECK, PYTHON, JOURNAL)
@click.option("--index", metavar="FILE|URL", help="The index of the journals, as for history.")
@click.option(
    "--node",
    metavar="NODE",
    help="Check this node now, with two partners that Slurm chooses, unless it was lately.",
)
@click.option("--avoid", metavar="NODELIST", help="With --node: no partners, as they are suspect.")
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and submit nothing.")
@click.argument("sbatch", nargs=-1, metavar="[-- SBATCH OPTIONS]")
@as_settings(_Asked)
def sweep(asked: _Asked) -> int:
    """Check idle nodes of a partition that no check has seen for a while, a few at a time.

    One run, for cron: it submits a job for each group of nodes and ends. The jobs have the lowest
    priority; a QOS or partition that other jobs preempt goes after --, as in -- --qos=scavenger.
    Nodes that have never been in one check are put together first. The next run continues where
    this one stopped, and reports what became of its jobs; slurm-health lemons and history print
    what was found.

    The exit code is 3 where jobs of earlier runs checked nothing, or where their outcome cannot be
    recorded, and 4 where Slurm refuses.
    """
    from slurm_health.fleet.sweep import submission
    from slurm_health.system.slurm.client import Client

    root, uid = config.journal_root(asked.journal, os.environ), os.geteuid()
    interpreter = _interpreter(asked.python)
    client = Client(os.environ, patience_s=0)
    # Those that had begun before Slurm says which run: one that another run submits meanwhile is
    # not taken for one that has ended.
    begun = submission.begun(root, uid)
    over = begun.difference(client.unended(uid)) if begun else begun
    wishes = _wishes(asked, root, interpreter, uid)
    if asked.node:
        return _check_with_partners(asked, asked.node, client, wishes, root)
    with opened_index(str(root), asked.index, rebuild=False) as found:
        chosen = submission.choose(client, found, wishes, uid=uid, now_s=time.time())
    if chosen.most < FEWEST:
        raise UsageError(
            f"a sweep can never check {asked.partition}: it takes {FEWEST} nodes at a time, leaves"
            f" one to jobs, and it has {chosen.most + 1}; check them in a job of their own:"
            f" salloc -p {asked.partition} -N {chosen.most + 1} slurm-health check"
        )
    if asked.dry_run:
        for group in chosen.groups:
            print_result(f"sbatch {' '.join(submission.options(group, wishes))}\n")
        ended: list[submission.EndedSweepJob] = []
        refused = False
    else:
        ended = submission.ended(root, uid, over)
        refused = _submit(client, chosen, wishes)
    _say(submission.told(ended))
    _say(
        f"{chosen.due} of {chosen.idle} idle nodes are due; at most {chosen.most} of"
        f" {asked.partition} at a time, and {chosen.in_checks} are being checked"
    )
    if refused:
        return int(ExitCode.UNAVAILABLE)
    wrong = submission.checks_nothing(ended) or wishes.output == _UNTOLD
    return int(ExitCode.INCONCLUSIVE if wrong else ExitCode.HEALTHY)


def _check_with_partners(
    asked: _Asked, node: str, client: Client, wishes: Wishes, root: Path
) -> int:
    """Submit the check of one node, unless it was checked lately or is being checked."""
    from slurm_health.fleet.sweep import submission
    from slurm_health.records.nodeset import expand

    try:
        known = client.nodes()
        named = expand(asked.avoid) if asked.avoid else []
    except ValueError as err:
        raise UsageError(f"--avoid: {err}") from err
    avoid = [name for name in named if name != node and name in known]
    options = submission.options([node], wishes, partners=FEWEST - 1, avoid=avoid)
    if asked.dry_run:
        print_result(f"sbatch {' '.join(options)}\n")
        return int(ExitCode.HEALTHY)
    with opened_index(str(root), asked.index, rebuild=False) as index:
        why_not = submission.why_not_now(client, index, node, uid=os.geteuid(), now_s=time.time())
    if why_not:
        print_result(f"{why_not}\n")
    else:
        job = client.submit(options, submission.script(wishes.check), os.environ)
        print_result(f"{job}  {node} with {FEWEST - 1} partners\n")
    return int(ExitCode.HEALTHY)


def _wishes(asked: _Asked, root: Path, interpreter: str | None, uid: int) -> Wishes:
    """Return what is to be checked, and how."""
    from slurm_health.fleet.sweep import submission
    from slurm_health.system.processes import own_command

    given = {"journal": str(root), "check": asked.check, "python": interpreter}
    words = own_command("check", *(f"--{name}={text}" for name, text in given.items() if text))
    return submission.Wishes(
        partition=asked.partition,
        share=asked.share,
        size=asked.size,
        every_s=asked.every_s,
        limit_min=asked.limit_min,
        check=words,
        sbatch=asked.sbatch,
        output=_output(root, uid, dry_run=asked.dry_run),
    )


def _interpreter(chosen: str | None) -> str | None:
    """Return the interpreter that the jobs are told to use, None where they look for one.

    Where none of those on this machine has torch, light probes will check the nodes: that is said.
    """
    from slurm_health.preflight.sbatch.foresight import may_have_torch

    if chosen is None:
        chosen = given_in_environ(os.environ, PYTHON).get("python")
    names = [chosen] if chosen else ["python3", sys.executable]
    tried = [path for name in names if (path := shutil.which(name))]
    if tried and not any(may_have_torch(path, os.environ) for path in tried):
        _say(
            f"no torch found by {' or '.join(dict.fromkeys(tried))}: where the nodes have none"
            f" either, light probes check them, which see no GPU and no NCCL; for more, name the"
            f" interpreter that jobs train with: --python=PATH, or {PYTHON.variable}"
        )
    return chosen


def _output(root: Path, uid: int, *, dry_run: bool) -> str:
    """Return where the jobs write, as sbatch names it; it is made unless nothing is submitted."""
    from slurm_health.fleet.sweep import submission

    trouble = "" if dry_run else submission.prepare(root, uid)
    kept = submission.directory(root, uid)
    if not trouble:
        return f"{kept}/%j.out"
    _say(f"the outcome of the jobs will not be recorded: {kept}: {trouble}")
    return _UNTOLD


def _submit(client: Client, chosen: Turn, wishes: Wishes) -> bool:
    """Submit a job for each group; tell whether Slurm refused one."""
    from slurm_health.fleet.sweep import submission
    from slurm_health.records.nodeset import fold

    refused = False
    for group in chosen.groups:
        try:
            options = submission.options(group, wishes)
            job = client.submit(options, submission.script(wishes.check), os.environ)
        except SlurmError as err:  # a group that Slurm refuses must not keep the others from it
            _say(f"{fold(group)} is not checked: {err}")
            refused = True
        else:
            print_result(f"{job}  {fold(group)}\n")
    return refused


def _say(text: str) -> None:
    if text:
        click.echo(f"slurm-health: {text}", err=True)
