# SPDX-License-Identifier: Apache-2.0
"""`slurm-health history` and `lemons`: what all checks say of nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slurm_health.cli.options import json_option, number_option
from slurm_health.cli.output import (
    ProgressLine,
    page_here,
    print_answer,
    print_result,
    replace_file,
)
from slurm_health.preflight import config
from slurm_health.preflight.options import JOURNAL, with_options
from slurm_health.records.errors import ExitCode, JournalError, SlurmError

if TYPE_CHECKING:
    from slurm_health.fleet.index import Index

_F = TypeVar("_F", bound=Callable[..., Any])
_CHECKS = 20  # of a node that are printed, the latest first; JSON has all
_MANY = 100  # fewer jobs are indexed before a person could read it


def _index_options(command: _F) -> _F:
    """Add the options of all commands that the history answers."""
    text = "How far back jobs count for the score."
    days = number_option("--days", 1, 3650, text, default=28, metavar="DAYS")
    return days(with_options(JOURNAL)(command))


@click.command()
@click.argument("nodes", metavar="NODE")
@_index_options
@json_option
def history(nodes: str, days: float, journal: str | None, as_json: bool) -> int:
    """Print what all checks have found on a node, and its typical figures.

    NODE is a node, or several as gpu[01-04]. Goes through all jobs whose journals you may read:
    your own, and with a shared root those that others let you read. Root may read all.
    """
    from slurm_health.fleet import answers

    with open_index(config.journal_root(journal, os.environ)) as index:
        nodes_found = answers.histories(
            index, nodes, now_s=time.time(), days=days, known=nodes_of_slurm()
        )
        unread = index.troubles()
    page = page_here()
    text = "\n".join(answers.history_text(node, page, most=_CHECKS) for node in nodes_found)
    print_answer(answers.document("nodes", nodes_found, unread), text, as_json=as_json)
    click.echo(answers.unread_text(unread, page), err=True, nl=False)
    return ExitCode.HEALTHY


@click.command()
@_index_options
@json_option
@click.option("--prometheus", is_flag=True, help="Print metrics of all nodes; exit with 0.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With --prometheus: replace this file, at once and whole.",
)
@click.option(
    "--publish", is_flag=True, help="Also replace the site's `standings` file, which checks read."
)
def lemons(
    days: float,
    journal: str | None,
    as_json: bool,
    prometheus: bool,
    output: Path | None,
    publish: bool,
) -> int:
    """List nodes that spoil one job after another, though no single check proves them faulty.

    A lemon has spoiled three jobs or more, over more than a day, more often than chance explains,
    compared with the other nodes of its cluster. A suspect has something against it, but less
    than that. The score is how many of its next 100 jobs a node is expected to spoil.

    Exits 1 if there is a lemon, and 4 if there is nothing to publish. --prometheus is for cron,
    and for node_exporter's textfile collector (documentation: admin/metrics.md).
    """
    from slurm_health.fleet import answers
    from slurm_health.fleet.standing import published
    from slurm_health.records.standings import Reliability

    if output is not None and not prometheus:
        raise click.UsageError("--output needs --prometheus")
    site, now_s = config.site_file(os.environ), time.time()
    standings = config.standings(os.environ) if publish else None
    if publish and standings is None:
        problem = f'no file to publish to: set standings = "/shared/FILE" in {site}'
        raise click.UsageError(problem)
    root = config.journal_root(journal, os.environ)
    with open_index(root) as index:
        clusters = answers.lemons(index, now_s=now_s, days=days, known=nodes_of_slurm())
        unread = index.troubles()
    if prometheus:
        from slurm_health.system.telemetry import prometheus_text

        text = prometheus_text(answers.gauges(clusters, unread, now_s=now_s))
        if output is None:
            print_result(text)
        else:
            replace_file(output, text.encode())
        return ExitCode.HEALTHY
    if standings is not None:
        if not any(cluster.nodes for cluster in clusters):
            raise JournalError(
                root,
                f"the journals here hold no check, so {standings} was left as it is; where journals"
                " lie in users' homes, a fleet has no common one: set journal = a shared directory"
                f" in {site} (documentation: admin/install.md)",
            )
        by_cluster = {cluster.cluster: cluster.nodes for cluster in clusters}
        replace_file(standings, published(by_cluster, now_s=now_s))
    page = page_here()
    document = answers.document("clusters", clusters, unread)
    print_answer(document, answers.lemons_text(clusters, page), as_json=as_json)
    click.echo(answers.unread_text(unread, page), err=True, nl=False)
    bad = any(node.level is Reliability.LEMON for cluster in clusters for node in cluster.nodes)
    return ExitCode.BAD_NODES if bad else ExitCode.HEALTHY


def nodes_of_slurm() -> dict[str, frozenset[str]]:
    """Return the nodes that Slurm has, by its cluster's name; nothing if it cannot be asked."""
    from slurm_health.system.slurm.client import Client

    client = Client(os.environ, patience_s=0)
    try:
        return {client.cluster_name(): frozenset(client.nodes())}
    except SlurmError:
        return {}


@contextmanager
def open_index(root: Path) -> Iterator[Index]:
    """Hold open the caller's index of journals, up to date; what was read is kept if it is ended.

    On a terminal a line shows how far the indexing is.
    """
    from slurm_health.fleet import index

    with ProgressLine() as line:

        def progress(done: int, of: int) -> None:
            if of >= _MANY:
                line.show(f"indexing journals: {done} of {of} jobs")

        path = index.index_path(root, os.environ)
        opened = index.opened(path, root, now_s=time.time(), progress=progress)
    with opened as runs:
        yield runs
