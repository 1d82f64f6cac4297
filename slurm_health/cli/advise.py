# SPDX-License-Identifier: Apache-2.0
"""`slurm-health advise`: what the history says about the next jobs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import click

from slurm_health.cli.history import FromIndex, index_options, nodes_of_slurm, opened_index
from slurm_health.cli.output import print_result, terminal
from slurm_health.cli.shared_options import as_settings
from slurm_health.records.errors import ExitCode


@dataclass(frozen=True, kw_only=True)
class _Advise(FromIndex):
    nodes: tuple[int, ...]
    hours: float
    risk: float
    as_json: bool


@click.command(short_help="Say how often nodes fail here, and how many spares a job needs.")
@click.option(
    "-N",
    "--nodes",
    type=click.IntRange(min=1, max=65536),
    multiple=True,
    metavar="N",
    help="A job of so many nodes; may be repeated.  [default: sizes that leave nodes to spare]",
)
@click.option(
    "--hours",
    type=click.FloatRange(min=0, min_open=True, max=8760),
    default=24,
    show_default=True,
    help="How long the script runs, for --keep-spares.",
)
@click.option(
    "--risk",
    type=click.FloatRange(min=0.0001, max=0.5),
    default=0.05,
    show_default=True,
    help="The share of jobs that may have more bad nodes than spares.",
)
@index_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all figures.")
@as_settings(_Advise)
def advise(asked: _Advise) -> int:
    """Say how often nodes fail here, and how many spares a job should ask for.

    From the history of all checks whose journals you may read: how often a node was bad when a job
    started, how often one failed under a script, how sure that is, how many spares follow from it
    for jobs of some sizes, and which nodes deserve a look. Where too little is known it says so,
    and takes a rate that was recorded on another cluster.
    """
    from slurm_health.fleet.history import advice, answer, presentation
    from slurm_health.report.layout import Page

    question = advice.Question(nodes=asked.nodes, hours=asked.hours, risk=asked.risk)
    with opened_index(asked.journal, asked.index, rebuild=asked.rebuild) as found:
        told = answer.lemons(
            found, cluster=asked.cluster, now_s=time.time(), days=asked.days, known=nodes_of_slurm()
        )
        unread = found.troubles()
    if asked.as_json:
        print_result(advice.advice_json(told, question, unread))
        return int(ExitCode.HEALTHY)
    width, unicode = terminal()
    page = Page(width=width, unicode=unicode)
    print_result(advice.advice_text(told, question, page))
    click.echo(presentation.unread_text(unread, page), err=True, nl=False)
    return int(ExitCode.HEALTHY)
