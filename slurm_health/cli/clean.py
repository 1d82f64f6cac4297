# SPDX-License-Identifier: Apache-2.0
"""`slurm-health clean`: remove old journals."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from slurm_health.cli.output import page_here, print_result
from slurm_health.cli.shared_options import as_settings
from slurm_health.preflight import config
from slurm_health.preflight.options import JOURNAL, with_options
from slurm_health.records.errors import ExitCode
from slurm_health.records.text import counted
from slurm_health.report.layout import Page

if TYPE_CHECKING:
    from slurm_health.fleet.retention.rules import Cleaning, JobJournal

_T = TypeVar("_T")
_FEW = 5  # jobs that are named of those that are left


def reading(
    read: Callable[[str], _T],
) -> Callable[[click.Context, click.Parameter, str | None], _T | None]:
    """Return a callback of click's that reads a value, and says what is wrong with it."""

    def read_option(ctx: click.Context, param: click.Parameter, text: str | None) -> _T | None:
        try:
            return None if text is None else read(text)
        except ValueError as err:
            raise click.BadParameter(str(err), ctx=ctx, param=param) from None

    return read_option


def read_age(text: str) -> float:
    """Return the seconds that an age stands for; ValueError where it is none."""
    from slurm_health.fleet.retention import rules as retention

    return retention.age_s(text)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What may go, and whether it goes."""

    older_than_s: float
    dry_run: bool
    yes: bool
    journal: str | None


@click.command(short_help="Remove old journals.")
@click.option(
    "--older-than",
    "older_than_s",
    metavar="AGE",
    required=True,
    callback=reading(read_age),
    help="Remove what was last written longer ago: 12h, 90d, 4w.",
)
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal.")
@with_options(JOURNAL)
@as_settings(_Asked)
def clean(asked: _Asked) -> int:
    """Remove your old journals.

    The journal of a job that has not ended is never removed. Slurm is asked once which those are;
    where it cannot be asked, what was written within 60 days is left. A journal's report and its
    part of the history go with it.
    """
    if not (asked.dry_run or asked.yes or sys.stdin.isatty()):
        raise click.UsageError(
            "no terminal to ask on: give --yes, or --dry-run to see what would be removed"
        )
    from slurm_health.fleet.retention import removal
    from slurm_health.fleet.retention import rules as retention
    from slurm_health.preflight.master.run_check import LOCAL_CLUSTER

    root, uid = config.journal_root(asked.journal, os.environ), os.geteuid()
    journals = removal.journals(root, uid=uid)
    alive = removal.alive(os.environ, uid=uid) if journals else removal.UnendedJobs()
    chosen = retention.choose(
        journals,
        retention.KnownJobs(
            alive={(alive.cluster, job) for job in alive.jobs},
            asked={alive.cluster} - {""},
            local=LOCAL_CLUSTER,
        ),
        now_s=time.time(),
        older_than_s=asked.older_than_s,
    )
    page = page_here()
    _explain(chosen, alive.why_not, page)
    if asked.dry_run:
        print_result(_list_text(chosen.remove, page))
    there = f"{counted(len(journals), 'journal')}, "
    all_bytes = retention.size_text(retention.total_bytes(journals))
    going_bytes = retention.size_text(retention.total_bytes(chosen.remove))
    many = len(chosen.remove)
    print_result(
        f"{many} of {there}{going_bytes} of {all_bytes}\n"
        if many
        else f"nothing to remove: {there}{all_bytes}\n"
    )
    if asked.dry_run:
        return int(ExitCode.HEALTHY)
    what = "this journal" if many == 1 else f"these {many} journals"
    question = f"Remove {what}? (--dry-run lists them)"
    if many and not asked.yes and not click.confirm(question, err=True):
        click.echo("slurm-health: nothing was removed", err=True)
        return int(ExitCode.HEALTHY)
    return _remove(root, chosen.remove, uid)


def _remove(root: Path, journals: Sequence[JobJournal], uid: int) -> int:
    from slurm_health.fleet.retention import removal

    failed = 0
    for each in journals:
        try:
            removal.remove(root, each)
        except FileNotFoundError:
            continue  # another one has removed it
        except removal.Changed as err:
            click.echo(f"slurm-health: job {each.job} is left: {err}", err=True)
        except OSError as err:
            failed += 1
            why = err.strerror or str(err)
            click.echo(f"slurm-health: job {each.job} could not be removed: {why}", err=True)
    removal.sweep(root, journals, uid=uid)
    return int(ExitCode.UNAVAILABLE if failed else ExitCode.HEALTHY)


def _explain(chosen: Cleaning, why_not_asked: str, page: Page) -> None:
    """Say on standard error what is left though it is older."""
    lines = []
    if why_not_asked and chosen.left:
        lines += page.paragraph(f"slurm-health: {why_not_asked}")
    for why, journals in chosen.left.items():
        jobs = ", ".join(each.job for each in journals[:_FEW])
        more = f" and {len(journals) - _FEW} more" if len(journals) > _FEW else ""
        lines += page.paragraph(f"slurm-health: left, because {why}: job {jobs}{more}")
    click.echo("".join(f"{line}\n" for line in lines), err=True, nl=False)


def _list_text(journals: Sequence[JobJournal], page: Page) -> str:
    from slurm_health.fleet.retention.rules import size_text

    if not journals:
        return ""
    rows = [("JOB", "SIZE", "LAST WRITTEN", "CLUSTER")]
    for journal in journals:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(journal.written_s))
        rows.append((journal.job, size_text(journal.size_bytes), written, journal.cluster))
    lines = page.table(rows, align=("right", "right", "left"))
    return "".join(f"{line}\n" for line in lines)
