# SPDX-License-Identifier: Apache-2.0
"""What Slurm says today of a job and its nodes: whether it waits again, and who took nodes away.

The journal ends with the job, and an epilog drains after it. Only Slurm's notes on the nodes tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slurm_health.records.errors import SlurmError
from slurm_health.report.layout import Page
from slurm_health.report.model import JobReport, State
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Node

_PATIENCE_S = 3.0
# Of an older job nobody asks what its nodes do today, and Slurm is left alone.
_RECENT_S = 7 * 86400.0


def waiting_again(report: JobReport, *, now_s: float, environ: Mapping[str, str]) -> JobReport:
    """Return the report with what Slurm says of a job that waits for its next attempt.

    As it is where the journal shows that it runs, where it is old, or where Slurm is silent.
    """
    last = report.runs[-1]
    over = last.script is not None and last.script.exit_code is not None
    recent = last.started_s is not None and 0 <= now_s - last.started_s < _RECENT_S
    if not recent or not (over or last.requeued or last.state is State.STOPPED):
        return report
    client = Client(environ, patience_s=0, deadline_s=_PATIENCE_S)
    try:
        if client.cluster() != report.cluster:
            return report
        job = client.job(report.job)
    except SlurmError:
        return report
    if "PENDING" not in job.states:
        return report
    why = f" ({job.reason})" if job.reason not in {"", "None"} else ""
    return replace(report, waits=f"pending again{why}")


def out_of_use(report: JobReport, *, now_s: float, environ: Mapping[str, str]) -> list[Node]:
    """Return the nodes of a recent job that Slurm has out of use; none where it does not answer."""
    started_s = report.runs[-1].started_s
    if started_s is None or not 0 <= now_s - started_s < _RECENT_S or not report.nodes:
        return []
    client = Client(environ, patience_s=0, deadline_s=_PATIENCE_S)
    try:
        if client.cluster() != report.cluster:
            return []
        found = client.nodes([node.node for node in report.nodes])
    except (SlurmError, ValueError):  # names that no node list can hold
        return []
    return [node for node in found.values() if node.out_of_pool]


def nodes_now(nodes: list[Node], page: Page) -> list[str]:
    """Return the lines of a block about nodes that are out of use, nothing where there are none."""
    rows = [["NOW", "STATE", "WHY, BY WHOM AND SINCE WHEN"]]
    rows += [[node.name, node.state.lower(), node.reason or "no reason given"] for node in nodes]
    return page.table(rows) if len(rows) > 1 else []
