# SPDX-License-Identifier: Apache-2.0
"""What was measured as rows of CSV: one for each node in each round of each check.

The columns stay as they are: a later version may add some at the end. docs/reference/report.md
describes them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from slurm_health.records.text import one_line
from slurm_health.report.export import figure_key
from slurm_health.report.measured import GroupReport, RoundReport
from slurm_health.report.model import JobReport, RunReport

_FIGURES = (
    "allgather",
    "rail_allgather",
    "node_allgather",
    "matmul",
    "memory_copy",
    "gpt step",
)
COLUMNS = (
    "cluster",
    "job",
    "attempt",
    "check",
    "round",
    "phase",
    "node",
    "partners",
    "outcome",
    "started_s",
    "elapsed_s",
    *map(figure_key, _FIGURES),
    "level",
    "component",
    "reason",
)
# What a spreadsheet takes for a formula.
_FORMULA = ("=", "+", "-", "@")


def as_csv(reports: Sequence[JobReport]) -> str:
    """Return every node's rounds in all checks of some jobs, with a line of names above them.

    A cell is empty where there is nothing: it was not measured, or not judged.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for report in reports:
        for run in report.runs:
            writer.writerows(_rows(report, run))
    return text.getvalue()


def _rows(report: JobReport, run: RunReport) -> Iterator[list[object]]:
    judged = {node.node: node.verdict for node in run.nodes}
    for each in run.each_round:
        for group in each.groups:
            for node, elapsed_s in zip(group.nodes, group.elapsed_s, strict=True):
                measured = run.measured.get((each.round, node), {})
                verdict = judged.get(node)
                row = [
                    report.cluster,
                    report.job,
                    run.attempt,
                    run.check,
                    *_where(run, each, group, node, elapsed_s),
                    *(_number(measured.get(name)) for name in _FIGURES),
                    verdict.level.value if verdict else "",
                    verdict.component if verdict else "",
                    verdict.reason if verdict else "",
                ]
                yield [_text(cell) if isinstance(cell, str) else cell for cell in row]


def _where(
    run: RunReport, each: RoundReport, group: GroupReport, node: str, elapsed_s: float | None
) -> list[object]:
    return [
        each.round,
        each.phase,
        node,
        " ".join(other for other in group.nodes if other != node),
        group.outcome.value if group.outcome else "",
        round((run.started_s or 0.0) + each.after_s, 3),
        "" if elapsed_s is None else elapsed_s,
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _text(text: str) -> str:
    """Return text in one line that no spreadsheet takes for a formula."""
    line = one_line(text)
    return f"'{line}" if line.startswith(_FORMULA) else line
