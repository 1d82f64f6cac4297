# SPDX-License-Identifier: Apache-2.0
"""What the history of all checks says: history, lemons."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slurm_health.cli.output import ProgressLine, page_here, print_result, replace_file
from slurm_health.cli.shared_options import as_settings
from slurm_health.preflight import config
from slurm_health.preflight.options import JOURNAL, with_options
from slurm_health.records.errors import ExitCode, JournalError, SlurmError

if TYPE_CHECKING:
    from slurm_health.fleet.history.index import Index
    from slurm_health.system.telemetry import Gauge

_F = TypeVar("_F", bound=Callable[..., Any])
_MANY = 100  # fewer jobs are indexed before a person could read it
_DAYS = click.FloatRange(min=0, min_open=True, max=3650)


@dataclass(frozen=True, kw_only=True)
class FromIndex:
    """What all commands take that are answered from the index."""

    journal: str | None
    cluster: str | None
    days: float
    index: str | None
    rebuild: bool


def index_options(command: _F) -> _F:
    """Give a command the options of `FromIndex`."""
    for option in reversed(
        [
            with_options(JOURNAL),
            click.option("--cluster", metavar="NAME", help="Only of this cluster."),
            click.option(
                "--days",
                metavar="DAYS",
                type=_DAYS,
                default=28,
                show_default=True,
                help="How far back jobs count for the score.",
            ),
            click.option(
                "--index",
                metavar="FILE",
                help="The index of the journals, made where it is missing."
                "  [default: SLURM_HEALTH_INDEX, the site's, or one in ~/.cache/slurm-health]",
            ),
            click.option("--rebuild", is_flag=True, help="Read all journals anew."),
        ]
    ):
        command = option(command)
    return command


@dataclass(frozen=True, kw_only=True)
class _History(FromIndex):
    nodes: str
    as_json: bool
    limit: int


@click.command(short_help="Print what all checks have found on a node.")
@click.argument("nodes", metavar="NODE")
@index_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="How many checks to print, the latest first. JSON has all.",
)
@as_settings(_History)
def history(asked: _History) -> int:
    """Print what all checks have found on a node, and whether its figures rise or fall.

    NODE is a node, or several as gpu[01-04]. Goes through all jobs whose journals you may read:
    your own, and with a shared root those that others let you read. Root may read all.
    """
    from slurm_health.fleet.history import answer, presentation

    with opened_index(asked.journal, asked.index, rebuild=asked.rebuild) as found:
        told = answer.histories(
            found,
            asked.nodes,
            cluster=asked.cluster,
            now_s=time.time(),
            days=asked.days,
            known=nodes_of_slurm(),
        )
        unread = found.troubles()
    if asked.as_json:
        print_result(presentation.histories_json(told, unread))
        return int(ExitCode.HEALTHY)
    page = page_here()
    print_result(
        "\n".join(presentation.history_text(each, page, most=asked.limit) for each in told)
    )
    click.echo(presentation.unread_text(unread, page), err=True, nl=False)
    return int(ExitCode.HEALTHY)


@dataclass(frozen=True, kw_only=True)
class _Lemons(FromIndex):
    as_json: bool
    prometheus: bool
    output: Path | None
    publish: bool


@click.command(short_help="List nodes that spoil one job after another.")
@index_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--prometheus",
    is_flag=True,
    help="Print the standing of all nodes in Prometheus' text format; exit with 0.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With --prometheus: replace this file, at once and whole.",
)
@click.option(
    "--publish",
    is_flag=True,
    help="Also replace the file that the site's `standings` names, which checks read.",
)
@as_settings(_Lemons)
def lemons(asked: _Lemons) -> int:
    """List nodes that spoil one job after another, though no single check proves them faulty.

    A lemon has spoiled three jobs or more, over more than a day, more often than chance explains,
    compared with the other nodes of its cluster. A suspect has something against it, but less
    than that. The score is how many of its next 100 jobs a node is expected to spoil.

    The exit code is 1 if there is a lemon, and 4 if there is nothing to publish. --prometheus is
    for cron on a machine that sees the journals, and for node_exporter's textfile collector; what
    the hooks find on a node, they write there themselves (documentation: admin/metrics.md).
    """
    if asked.output is not None and not asked.prometheus:
        raise click.UsageError("--output needs --prometheus")
    from slurm_health.fleet.history import answer, presentation
    from slurm_health.fleet.standing.standing import published
    from slurm_health.records.standings import Reliability

    path = _to_publish(asked.cluster) if asked.publish else None
    with opened_index(asked.journal, asked.index, rebuild=asked.rebuild) as found:
        told = answer.lemons(
            found, cluster=asked.cluster, now_s=time.time(), days=asked.days, known=nodes_of_slurm()
        )
        unread = found.troubles()
    if asked.prometheus:
        return _print_metrics(presentation.gauges(told, unread, now_s=time.time()), asked.output)
    if path is not None:
        standings = {each.cluster: each.standings for each in told}
        if not any(standings.values()):
            raise JournalError(
                config.journal_root(asked.journal, os.environ), _nothing_to_publish(path)
            )
        replace_file(path, published(standings, now_s=time.time()))
    if asked.as_json:
        print_result(presentation.lemons_json(told, unread))
    else:
        page = page_here()
        print_result(presentation.lemons_text(told, page))
        click.echo(presentation.unread_text(unread, page), err=True, nl=False)
    bad = any(each.level is Reliability.LEMON for cluster_ in told for each in cluster_.standings)
    return int(ExitCode.BAD_NODES if bad else ExitCode.HEALTHY)


def _print_metrics(gauges: Sequence[Gauge], output: Path | None) -> int:
    from slurm_health.system.telemetry import prometheus_text

    text = prometheus_text(gauges)
    if output is None:
        print_result(text)
    else:
        replace_file(output, text.encode())
    return int(ExitCode.HEALTHY)


def _nothing_to_publish(path: Path) -> str:
    return (
        f"the journals here hold no check, so {path} was left as it is; where journals lie in"
        " users' homes, a fleet has no common one: set journal = a shared directory in"
        f" {config.site_file(os.environ)} (documentation: admin/install.md)"
    )


def _to_publish(cluster: str | None) -> Path:
    """Return where the site publishes the standings of all nodes."""
    if cluster is not None:
        raise click.UsageError("--publish is for all clusters: leave out --cluster")
    path = config.standings(os.environ)
    if path is None:
        raise click.UsageError(
            f'no file to publish to: set standings = "/shared/FILE" in'
            f" {config.site_file(os.environ)}"
        )
    return path


def nodes_of_slurm() -> dict[str, frozenset[str]]:
    """Return the nodes that Slurm has, by its cluster's name; nothing where it cannot be asked."""
    from slurm_health.system.slurm.client import Client

    client = Client(os.environ, patience_s=0)
    try:
        return {client.cluster_name(): frozenset(client.nodes())}
    except SlurmError:
        return {}


@contextlib.contextmanager
def opened_index(journal: str | None, index: str | None, *, rebuild: bool) -> Iterator[Index]:
    """Hold open the index that the options name, up to date."""
    from slurm_health.fleet.history import place, refresh

    root = config.journal_root(journal, os.environ)
    site = config.history_index(os.environ)
    where = place.choose(index, os.environ, root, site=site)
    now_s = time.time()
    with (
        _progress() as progress,
        refresh.opened(where, root, now_s=now_s, rebuild=rebuild, progress=progress) as found,
    ):
        yield found


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Say on a terminal how far the indexing is; what is done so far is kept if it is ended."""
    if not sys.stderr.isatty():
        yield lambda _done, _of: None
        return
    line = ProgressLine(sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.addFilter(line)
    try:
        yield (
            lambda done, of: (
                line.show(f"indexing journals: {done} of {of} jobs") if of >= _MANY else None
            )
        )
    finally:
        line.erase()
        for handler in logging.getLogger().handlers:
            handler.removeFilter(line)
