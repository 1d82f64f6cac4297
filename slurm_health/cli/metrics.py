# SPDX-License-Identifier: Apache-2.0
"""`slurm-health metrics`: the standing of every node, for Prometheus."""

from __future__ import annotations

import time
from pathlib import Path

import click

from slurm_health.cli.history import index_options, nodes_of_slurm, opened_index
from slurm_health.cli.replaced_file import replace_file
from slurm_health.cli.terminal import print_result
from slurm_health.records.errors import ExitCode
from slurm_health.system import templates


@click.command(short_help="Print metrics of all nodes for Prometheus.")
@index_options
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Replace this file, at once and whole: DIRECTORY/slurm_health_history.prom.",
)
@click.option("--dashboard", is_flag=True, help="Print the Grafana dashboard instead.")
def metrics(
    journal: str | None,
    cluster: str | None,
    days: float,
    index: str | None,
    rebuild: bool,
    output: Path | None,
    dashboard: bool,
) -> int:
    """Print the standing of all nodes, as `lemons` finds it, in Prometheus' text format.

    For cron on a machine that sees the journals, and for node_exporter's textfile collector. What
    the hooks find on each node, they write there themselves: see slurm-health docs metrics.
    """
    if dashboard:
        shipped = templates.shipped("grafana") / "slurm-health.json"
        print_result(shipped.read_text(encoding="utf-8"))
        return int(ExitCode.HEALTHY)
    from slurm_health.fleet.history import answer
    from slurm_health.fleet.history import export as of_history
    from slurm_health.system.telemetry import prometheus_text

    now_s = time.time()
    with opened_index(journal, index, rebuild=rebuild) as found:
        told = answer.lemons(found, cluster=cluster, now_s=now_s, days=days, known=nodes_of_slurm())
        gauges = of_history.gauges(told, found.troubles(), now_s=now_s)
    if output is None:
        print_result(prometheus_text(gauges))
    else:
        replace_file(output, prometheus_text(gauges).encode())
    return int(ExitCode.HEALTHY)
