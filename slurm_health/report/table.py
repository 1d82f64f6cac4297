# SPDX-License-Identifier: Apache-2.0
"""The report as text: what counts first, one row per kind of node, worst first, a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from slurm_health.records.probe_catalog import ALLGATHER, MATMUL, unit_of
from slurm_health.records.text import counted
from slurm_health.records.verdict import Level
from slurm_health.report import details
from slurm_health.report.layout import NOTHING, Page, range_text
from slurm_health.report.model import JobReport, NodeReport, RunReport
from slurm_health.report.phrases import (
    WORST_FIRST,
    attempt_text,
    effort_text,
    found_text,
    left_texts,
    moment_text,
    nodes_text,
    outcome_texts,
)
from slurm_health.report.post_mortem import post_mortems, while_training
from slurm_health.report.summary import summary_of
from slurm_health.report.timeline import timeline_lines

_ALWAYS_SHOWN = (ALLGATHER, MATMUL)
_PER_TFLOP = 1000.0
_SLOWER = " slower"  # in the reason of a node that is worth a word; processors' shares are not
_NOTED = 3  # healthy nodes that are slower than most: the slowest, before the rest is only named


def job_text(
    report: JobReport,
    *,
    width: int | None = None,
    unicode: bool = True,
    verbose: bool = False,
    followed: bool = False,
) -> str:
    """Return the report of a job, without a newline at its end.

    Args:
        report: what to show.
        width: columns of the terminal, None to break no line.
        unicode: whether the output can show more than ASCII.
        verbose: tell all evidence, every group of every round, and every sample.
        followed: it is drawn anew while the job runs.
    """
    page = Page(width=width, unicode=unicode)
    told = summary_of(report, followed=followed).rows()
    return _blocks(
        _unseen(report.runs[-1:], page),
        [*page.phrases(_title(report)), *_summary(told, page)],
        _checks(report.runs, page),
        _missing(report.runs, page),
        _nodes(report, page),
        [
            *_links(report, page),
            *_slower_but_healthy(report.nodes, page),
        ],
        details.unwell(report, page, whole=verbose),
        timeline_lines(report.runs, page, verbose=verbose),
        while_training(report.runs, page),
        post_mortems(report.runs, page),
        details.samples(report.runs, page) if verbose else [],
    )


def tasks_text(
    reports: Sequence[JobReport],
    *,
    others: Mapping[str, str] = MappingProxyType({}),
    width: int | None = None,
    unicode: bool = True,
) -> str:
    """Return the tasks of an array, each by its last check and with its bad nodes by name.

    `others` are tasks without a journal, and why they have none. Arguments as for `job_text`.
    """
    page = Page(width=width, unicode=unicode)
    lines = [page.phrases([report.job, *_task(report)]) for report in reports]
    lines += [page.phrases([tasks, why]) for tasks, why in others.items()]
    how = f"slurm-health report {reports[0].job} shows one task in full."
    return _blocks([line for task in lines for line in task], page.paragraph(how))


def _task(report: JobReport) -> list[str]:
    last = report.runs[-1]
    found = [_node_list(last.nodes), found_text(last, names=True), *left_texts(report)]
    found += outcome_texts(last)
    return [attempt_text(last), *found] if len(report.runs) > 1 else found


def check_summary(run: RunReport, *, width: int | None = None, unicode: bool = True) -> str:
    """Return the report of one check, as `slurm-health check` prints it at its end.

    Arguments as for `job_text`.
    """
    page = Page(width=width, unicode=unicode)
    first = page.phrases([headline(run), *outcome_texts(run)])
    notes = [*_links(run, page), *_slower_but_healthy(run.nodes, page)]
    return _blocks(_unseen([run], page), first, _nodes(run, page), notes)


def headline(run: RunReport) -> str:
    """Return one check in one line: `n[1-5]: 3 rounds, 6.1 s: 1 faulty (n3)`."""
    parts = [_node_list(run.nodes), effort_text(run), found_text(run, names=True)]
    return ": ".join(part for part in parts if part)


def _blocks(*blocks: Sequence[str]) -> str:
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _node_list(nodes: Sequence[NodeReport]) -> str:
    return nodes_text(node.node for node in nodes)


def _summary(rows: Sequence[tuple[str, str]], page: Page) -> list[str]:
    return page.titled([(title.upper(), text) for title, text in rows])


def _checks(runs: Sequence[RunReport], page: Page) -> list[str]:
    """Return a line for each check; of a single one all is said in the lines above."""
    if len(runs) == 1:
        return []
    return [line for run in runs for line in page.phrases(_check(run))]


def _title(report: JobReport) -> list[str]:
    started = [run.started for run in report.runs if run.started]
    job = report.job
    if started and started[-1].array == job:
        job = f"{job} ({started[-1].job_id})"
    place = f"{report.cluster}/{report.partition}" if report.partition else report.cluster
    began = [moment_text(report.runs[0].started_s)] if report.runs[0].started_s else []
    if len(report.runs) == 1:
        (run,) = report.runs
        return [f"Job {job}", report.script, place, *began, _node_list(run.nodes), effort_text(run)]
    attempts = len({run.attempt for run in report.runs})
    counts = counted(attempts, "attempt")
    if len(report.runs) > attempts:
        counts += f", {len(report.runs)} checks"
    return [f"Job {job}", report.script, place, *began, counts]


def facts_of(run: RunReport) -> list[str]:
    """Return one check in phrases: its nodes, its effort, what it found and led to."""
    return [phrase for phrase in _check(run)[1:] if phrase]


def _check(run: RunReport) -> list[str]:
    found = [attempt_text(run), _node_list(run.nodes), effort_text(run), found_text(run)]
    return [*found, *outcome_texts(run)]


def _missing(runs: Sequence[RunReport], page: Page) -> list[str]:
    """Return what of the journals is not there or cannot be read."""
    lines = []
    for run in runs:
        if run.missing:
            lacks = "; ".join(run.missing)
            lines += page.paragraph(f"missing in the journal of {attempt_text(run)}: {lacks}")
    return lines


# The nodes: rows that say the same are one.


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Nodes of which the same is to be said."""

    nodes: tuple[NodeReport, ...]
    level: Level | None
    reason: str

    def values(self, probe: str) -> list[float]:
        return [value for node in self.nodes for value in node.figures.get(probe, ())]


def _nodes(report: JobReport | RunReport, page: Page) -> list[str]:
    if not report.nodes:
        return []
    rows = _rows(report.nodes)
    columns: list[list[str]] = [
        ["NODES", *(_node_list(row.nodes) for row in rows)],
        ["VERDICT", *(row.level.value if row.level else NOTHING for row in rows)],
        *(_column(probe, rows) for probe in [*_ALWAYS_SHOWN, *_in_question(rows)]),
        ["REASON", *(row.reason for row in rows)],
    ]
    return page.table(list(zip(*columns, strict=True)))


def _rows(nodes: Sequence[NodeReport]) -> list[_Row]:
    """Return the rows, worst first. The healthy share one, and a reason only if all have it."""
    rows = []
    for level in WORST_FIRST:
        at_level = [node for node in nodes if node.level is level]
        by_reason: dict[str, list[NodeReport]] = {}
        for node in at_level:
            by_reason.setdefault(node.verdict.reason if node.verdict else "", []).append(node)
        if level in (Level.HEALTHY, None) and len(by_reason) > 1:
            by_reason = {"": at_level}
        rows += [
            _Row(nodes=tuple(same), level=level, reason=reason)
            for reason, same in by_reason.items()
        ]
    return rows


def _in_question(rows: Sequence[_Row]) -> list[str]:
    """Return the other probes that a node is not well in, by name."""
    unwell = [row for row in rows if row.level not in (Level.HEALTHY, None)]
    measured = {probe for row in rows for node in row.nodes for probe in node.figures}
    named = {probe for probe in measured if any(probe in row.reason for row in unwell)}
    return sorted(named - set(_ALWAYS_SHOWN))


def _column(probe: str, rows: Sequence[_Row]) -> list[str]:
    """Return a column's head, and its text in each row."""
    unit = unit_of(probe)
    values = [row.values(probe) for row in rows]
    if probe == MATMUL and any(value >= _PER_TFLOP for row in values for value in row):
        unit = "TFLOP/s"
        values = [[value / _PER_TFLOP for value in row] for row in values]
    return [f"{probe.upper()} {unit}", *map(range_text, values)]


def _links(report: JobReport | RunReport, page: Page) -> list[str]:
    """Return what is said about paths and leaf switches."""
    lines = []
    for kind, judged in (("path", report.paths), ("leaf", report.leaves)):
        for path in judged:
            what = f"{kind} {NOTHING.join(path.ends)} {path.level.value}"
            lines += page.paragraph(f"{what}: {path.reason}" if path.reason else what)
    return lines


def _unseen(runs: Iterable[RunReport], page: Page) -> list[str]:
    """Return what the probes of these checks could not see."""
    return [line for run in runs if run.unseen for line in page.paragraph(run.unseen)]


def _slower_but_healthy(nodes: Sequence[NodeReport], page: Page) -> list[str]:
    """Return what a job will wait for although nothing is wrong with it, the slowest first."""
    judged = [node.verdict for node in nodes if node.verdict and node.level is Level.HEALTHY]
    slower = sorted(
        (verdict for verdict in judged if verdict.slowdown > 1 and _SLOWER in verdict.reason),
        key=lambda verdict: -verdict.slowdown,
    )
    lines = []
    for verdict in slower[:_NOTED]:
        lines += page.paragraph(f"healthy {verdict.node}: {verdict.reason}")
    rest = nodes_text(sorted(verdict.node for verdict in slower[_NOTED:]))
    if rest:
        lines += page.paragraph(f"healthy {rest}: slower than most, but less so than these")
    return lines
