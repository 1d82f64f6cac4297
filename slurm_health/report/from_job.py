# SPDX-License-Identifier: Apache-2.0
"""What all checks of one job say together. Pure: no file, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from slurm_health.core.records import PathJudged
from slurm_health.core.verdict import Level
from slurm_health.report.from_run import run_report
from slurm_health.report.model import (
    JobReport,
    NodeReport,
    RunEntries,
    RunReport,
    attempt_and_check,
)


def job_report(runs: Sequence[RunEntries], *, now_s: float | None = None) -> JobReport:
    """Return what all checks of one job did and found.

    Args:
        runs: at least one, oldest first.
        now_s: see `run_report`.
    """
    attempts = [(attempt_and_check(run.label) or (0, 1))[0] for run in runs]
    reports = tuple(
        run_report(
            run,
            now_s=now_s,
            superseded=index + 1 < len(runs),
            requeued=max(attempts) > attempts[index],
        )
        for index, run in enumerate(runs)
    )
    known = [report.started for report in reports if report.started]
    start = known[-1] if known else None
    return JobReport(
        job=(start.array or str(start.job_id)) if start else runs[0].job,
        cluster=start.cluster if start else runs[0].cluster,
        partition=start.partition if start else "",
        script=next((report.script.name for report in reversed(reports) if report.script), "")
        or (PurePath(start.script).name if start else ""),
        runs=reports,
        nodes=_decisive(reports),
        paths=_standing_paths(reports),
        leaves=tuple({tuple(leaf.ends): leaf for run in reports for leaf in run.leaves}.values()),
    )


def _decisive(runs: Sequence[RunReport]) -> tuple[NodeReport, ...]:
    chosen: dict[str, NodeReport] = {}
    for run in runs:
        for node in run.nodes:
            if _weight(node) >= _weight(chosen.get(node.node)):
                chosen[node.node] = node
    return tuple(chosen.values())


def _weight(node: NodeReport | None) -> int:
    if node is None or node.level is None:
        return 0
    return 1 if node.level is Level.INCONCLUSIVE else 2


def _standing_paths(runs: Sequence[RunReport]) -> tuple[PathJudged, ...]:
    """Return the bad paths that no later verdict on both of their ends has cleared."""
    standing: dict[frozenset[str], PathJudged] = {}
    for run in runs:
        if run.judged:
            judged = {node.node for node in run.nodes if node.verdict}
            standing = {ends: path for ends, path in standing.items() if not ends <= judged}
        standing |= {frozenset(path.ends): path for path in run.paths}
    return tuple(standing.values())
