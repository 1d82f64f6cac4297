# SPDX-License-Identifier: Apache-2.0
"""`slurm-health clean`: remove old journals."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from slurm_health.cli.output import print_result, terminal
from slurm_health.cli.shared_options import as_settings, shared_options
from slurm_health.preflight import config
from slurm_health.preflight.options import Door
from slurm_health.records.errors import ExitCode
from slurm_health.records.text import counted

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


def _size(text: str) -> int:
    from slurm_health.fleet.retention import rules as retention

    return retention.size_bytes(text)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What may go, and how that is told."""

    older_than_s: float | None
    most_bytes: int | None
    dry_run: bool
    yes: bool
    all_users: bool
    cluster: str | None
    journal: str | None
    as_json: bool


@click.command(short_help="Remove old journals.")
@click.option(
    "--older-than",
    "older_than_s",
    metavar="AGE",
    callback=reading(read_age),
    help="Remove what was last written longer ago: 12h, 90d, 4w.",
)
@click.option(
    "--max-size",
    "most_bytes",
    metavar="SIZE",
    callback=reading(_size),
    help="Remove the oldest until no more than SIZE is taken: 20GiB. With --all-users, those of"
    " the users who take most.",
)
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal.")
@click.option(
    "--all-users", is_flag=True, help="Root only: the journals of all users below a root."
)
@click.option("--cluster", metavar="NAME", help="Only of this cluster.")
@shared_options(Door.CHECK, "journal")
@click.option("--json", "as_json", is_flag=True, help="Print what goes, and what is left, as JSON.")
@as_settings(_Asked)
def clean(asked: _Asked) -> int:
    """Remove your old journals: by age, by size, or both.

    The journal of a job that has not ended is never removed. Slurm is asked once which those are;
    where it cannot be asked, what was written within 60 days is left. A journal's report and its
    part of the history go with it.
    """
    _refuse_what_cannot_be_done(asked)
    from slurm_health.fleet.retention import removal
    from slurm_health.fleet.retention import rules as retention
    from slurm_health.preflight.master.run_check import LOCAL_CLUSTER
    from slurm_health.system.accounts import Accounts

    root = config.journal_root(asked.journal, os.environ)
    uid = None if asked.all_users else os.geteuid()
    there = removal.journals(root, uid=uid, cluster=asked.cluster)
    alive = removal.alive(os.environ, uid=uid) if there else removal.UnendedJobs()
    chosen = retention.choose(
        there,
        retention.KnownJobs(
            alive={(alive.cluster, job) for job in alive.jobs},
            asked={alive.cluster} - {""},
            local=LOCAL_CLUSTER,
        ),
        now_s=time.time(),
        older_than_s=asked.older_than_s,
        most_bytes=asked.most_bytes,
        user_of=Accounts().user,
    )
    width, _ = terminal()
    _explain(chosen, alive.why_not, width)
    if asked.as_json:
        print_result(_json(chosen, there, dry_run=asked.dry_run))
    elif asked.dry_run:
        print_result(_list_text(chosen.remove, width, owners=asked.all_users))
    if not asked.as_json:
        print_result(_summary(chosen.remove, there) + "\n")
    if asked.dry_run:
        return int(ExitCode.HEALTHY)
    if chosen.remove and not asked.yes and not click.confirm(_question(chosen.remove), err=True):
        click.echo("slurm-health: nothing was removed", err=True)
        return int(ExitCode.HEALTHY)
    return _remove(root, chosen.remove, uid)


def _refuse_what_cannot_be_done(asked: _Asked) -> None:
    if asked.older_than_s is None and asked.most_bytes is None:
        raise click.UsageError("say what to remove: --older-than AGE, --max-size SIZE, or both")
    if asked.all_users and os.geteuid() != 0:
        raise click.UsageError("--all-users is for root: others can remove their own journals only")
    if not (asked.dry_run or asked.yes or sys.stdin.isatty()):
        raise click.UsageError(
            "no terminal to ask on: give --yes, or --dry-run to see what would be removed"
        )


def _remove(root: Path, journals: Sequence[JobJournal], uid: int | None) -> int:
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


def _explain(chosen: Cleaning, why_not_asked: str, width: int | None) -> None:
    """Say on standard error what is left though a limit says that it may go."""
    from slurm_health.report.layout import Page

    page, lines = Page(width=width), []
    if why_not_asked and chosen.left:
        lines += page.paragraph(f"slurm-health: {why_not_asked}")
    for why, journals in chosen.left.items():
        jobs = ", ".join(each.job for each in journals[:_FEW])
        more = f" and {len(journals) - _FEW} more" if len(journals) > _FEW else ""
        lines += page.paragraph(f"slurm-health: left, because {why}: job {jobs}{more}")
    click.echo("".join(f"{line}\n" for line in lines), err=True, nl=False)


def _list_text(journals: Sequence[JobJournal], width: int | None, *, owners: bool) -> str:
    """Return a table of journals, with their owners where they may have several."""
    from slurm_health.fleet.retention.rules import size_text
    from slurm_health.report.find import user_name
    from slurm_health.report.layout import Page

    if not journals:
        return ""
    rows = [("JOB", "SIZE", "LAST WRITTEN", "CLUSTER", *(["USER"] if owners else []))]
    for each in journals:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.written_s))
        whose = [user_name(each.uid)] if owners else []
        rows.append((each.job, size_text(each.size_bytes), written, each.cluster, *whose))
    lines = Page(width=width).table(rows, align=("right", "right", "left"))
    return "".join(f"{line}\n" for line in lines)


def _question(journals: Sequence[JobJournal]) -> str:
    """Return what is asked before anything goes; whose it is, where somebody else's goes too."""
    from slurm_health.report.find import user_name

    what = "this journal" if len(journals) == 1 else f"these {len(journals)} journals"
    uids = {each.uid for each in journals}
    if uids == {os.geteuid()}:
        return f"Remove {what}?"
    few = ", ".join(sorted(map(user_name, uids)))
    whose = f" of {few}" if len(uids) <= _FEW else f" of {len(uids)} users"
    return f"Remove {what}{whose}? (--dry-run lists them)"


def _summary(journals: Sequence[JobJournal], there: Sequence[JobJournal]) -> str:
    from slurm_health.fleet.retention.rules import size_text, total_bytes

    if not journals:
        return (
            f"nothing to remove: {counted(len(there), 'journal')}, {size_text(total_bytes(there))}"
        )
    return (
        f"{len(journals)} of {counted(len(there), 'journal')},"
        f" {size_text(total_bytes(journals))} of {size_text(total_bytes(there))}"
    )


def _json(chosen: Cleaning, there: Sequence[JobJournal], *, dry_run: bool) -> str:
    import msgspec

    document = {
        "version": 1,
        "dry_run": dry_run,
        "journals": len(there),
        "remove": msgspec.to_builtins(chosen.remove),
        "left": {why.name.lower(): msgspec.to_builtins(each) for why, each in chosen.left.items()},
    }
    return json.dumps(document, indent=2) + "\n"
