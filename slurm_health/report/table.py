# SPDX-License-Identifier: Apache-2.0
"""The report as text: one line per check, one row per kind of node, worst first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath

from slurm_health.core.verdict import Level, LinkVerdict
from slurm_health.report.build import acted
from slurm_health.report.figures import ALLGATHER, MATMUL, unit_of
from slurm_health.report.layout import flowed, printable, table, wrapped
from slurm_health.report.model import Event, JobReport, NodeReport, RunReport
from slurm_health.report.phrases import (
    NOTHING,
    WORST_FIRST,
    attempt_text,
    effort_text,
    found_text,
    nodes_text,
    outcome_texts,
    range_text,
)

_ALWAYS_SHOWN = (ALLGATHER, MATMUL)
_PER_TFLOP = 1000.0


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Nodes of which the same is to be said."""

    nodes: tuple[NodeReport, ...]
    level: Level | None
    reason: str

    def values(self, probe: str) -> list[float]:
        return [
            value
            for node in self.nodes
            for figure in node.figures
            if figure.probe == probe
            for value in figure.values
        ]


def job_text(report: JobReport, *, width: int | None = None, unicode: bool = True) -> str:
    """Return the report of a job, without a newline at its end.

    Args:
        report: what to show.
        width: columns of the terminal, None to break no line.
        unicode: whether the output can show more than ASCII.
    """
    show = partial(printable, unicode=unicode)
    lines = flowed([("  ", show(part)) for part in _title(report)], width)
    for run in report.runs:
        lines += flowed([(gap, show(part)) for gap, part in _attempt_line(run)], width)
    nodes = _node_lines(report.nodes, width, unicode=unicode)
    paths = _path_lines(report.paths, report.leaves, width, unicode=unicode)
    return _blocks(lines, nodes, paths, timeline_lines(report.runs, width, unicode=unicode))


def check_summary(run: RunReport, *, width: int | None = None, unicode: bool = True) -> str:
    """Return the report of one check, as `slurm-health check` prints it at its end.

    Arguments as for `job_text`.
    """
    show = partial(printable, unicode=unicode)
    acts = [("   ", show(part)) for part in outcome_texts(run)]
    lines = flowed([("", show(headline(run))), *acts], width)
    nodes = _node_lines(run.nodes, width, unicode=unicode)
    paths = _path_lines(run.paths, run.leaves, width, unicode=unicode)
    return _blocks(lines, nodes, paths)


def headline(run: RunReport) -> str:
    """Return one check in one line: `n[1-5]: 3 rounds, 6.1 s: 1 faulty (n3)`."""
    nodes = nodes_text(node.node for node in run.nodes)
    parts = [nodes, effort_text(run), found_text(run, names=True)]
    return ": ".join(part for part in parts if part)


def _blocks(*blocks: Sequence[str]) -> str:
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _title(report: JobReport) -> list[str]:
    started = [run.started for run in report.runs if run.started]
    job = report.job
    if started and started[-1].array == job:
        job = f"{job} ({started[-1].job_id})"
    place = f"{report.cluster}/{report.partition}" if report.partition else report.cluster
    attempts = len({run.attempt for run in report.runs})
    counts = f"{attempts} attempt{'s' if attempts != 1 else ''}"
    if len(report.runs) > attempts:
        counts += f", {len(report.runs)} checks"
    return [f"Job {job}", report.script, place, counts]


def _attempt_line(run: RunReport) -> list[tuple[str, str]]:
    return [
        ("", attempt_text(run)),
        ("  ", nodes_text(node.node for node in run.nodes)),
        ("  ", effort_text(run)),
        ("   ", found_text(run)),
        *(("   ", text) for text in outcome_texts(run)),
    ]


def _rows(nodes: Sequence[NodeReport]) -> list[_Row]:
    """Return the rows, worst first. The healthy share one, and a reason only if all have it."""
    rows = []
    for level in WORST_FIRST:
        at_level = [node for node in nodes if node.level is level]
        reasons = dict.fromkeys(node.verdict.reason for node in at_level if node.verdict)
        if at_level and level in (Level.HEALTHY, None):
            shared = "".join(reasons) if len(reasons) == 1 else ""
            rows.append(_Row(nodes=tuple(at_level), level=level, reason=shared))
            continue
        for reason in reasons:
            same = [node for node in at_level if node.verdict and node.verdict.reason == reason]
            rows.append(_Row(nodes=tuple(same), level=level, reason=reason))
    return rows


def _node_lines(nodes: Sequence[NodeReport], width: int | None, *, unicode: bool) -> list[str]:
    if not nodes:
        return []
    show = partial(printable, unicode=unicode)
    rows = _rows(nodes)
    shown = [*_ALWAYS_SHOWN, *_in_question(rows)]
    columns = [_column(probe, rows) for probe in shown]
    cells = [
        [
            show(nodes_text(node.node for node in row.nodes)),
            show(row.level.value if row.level else NOTHING),
            *(show(texts[index]) for _, texts in columns),
        ]
        for index, row in enumerate(rows)
    ]
    heads = [("NODES", ""), ("VERDICT", ""), *(head for head, _ in columns)]
    return table(heads, cells, [show(row.reason) for row in rows], "REASON", width)


def _in_question(rows: Sequence[_Row]) -> list[str]:
    """Return the other probes that a node is not well in, by name."""
    unwell = [row for row in rows if row.level not in (Level.HEALTHY, None)]
    measured = {figure.probe for row in rows for node in row.nodes for figure in node.figures}
    named = {probe for probe in measured if any(probe in row.reason for row in unwell)}
    return sorted(named - set(_ALWAYS_SHOWN))


def _column(probe: str, rows: Sequence[_Row]) -> tuple[tuple[str, str], list[str]]:
    """Return the two words of a column's head, and its text in each row."""
    unit = unit_of(probe)
    values = [row.values(probe) for row in rows]
    if (
        probe == MATMUL
        and max((max(row, default=0.0) for row in values), default=0.0) >= _PER_TFLOP
    ):
        unit = "TFLOP/s"
        values = [[value / _PER_TFLOP for value in row] for row in values]
    return (printable(probe).upper(), unit), [range_text(row) for row in values]


def _path_lines(
    paths: Sequence[LinkVerdict],
    leaves: Sequence[LinkVerdict],
    width: int | None,
    *,
    unicode: bool,
) -> list[str]:
    lines = []
    for kind, judged in (("path", paths), ("leaf", leaves)):
        for path in judged:
            what = f"{kind} {NOTHING.join(path.ends)} {path.level.value}"
            text = f"{what}: {path.reason}" if path.reason else what
            first, *more = wrapped(printable(text, unicode=unicode), width and width - 4)
            lines += [first, *(f"    {line}" for line in more)]
    return lines


# What is done, before it is done and after, and what it is called where it failed.
_WORDS = {
    "drain": ("drain", "drained", "did not drain"),
    "exclude": ("exclude", "excluded", "did not exclude"),
    "drop": ("give back", "gave back", "could not give back"),
    "requeue": ("requeue the job", "released the job", "did not requeue the job"),
    "hold": ("hold the job", "held the job", "did not hold the job"),
    "proceed": ("go on with", "went on with", "did not go on with"),
}
_ON_THE_JOB = {"requeue", "hold"}
_DISPOSITIONS = {
    "proceed": "the job goes on",
    "requeue": "the job leaves, to be requeued",
    "hold": "the job leaves, to be held",
    "stop": "the job ends",
}


def timeline_lines(runs: Sequence[RunReport], width: int | None, *, unicode: bool) -> list[str]:
    """Return the timeline of every check, if anything was done in one of them."""
    if not any(acted(run.timeline) for run in runs):
        return []
    rows: list[list[str]] = []
    remarks: list[str] = []
    for run in runs:
        label = attempt_text(run)
        for event in run.timeline:
            rows.append([label, f"{event.after_s:7.1f}"])
            remarks.append(printable(_text(event), unicode=unicode))
            label = ""
    return table([("TIMELINE", ""), ("SECONDS", "")], rows, remarks, "EVENT", width)


def _text(event: Event) -> str:
    match event.what:
        case "run_started":
            return f"began to check {nodes_text(event.nodes)}"
        case "master_resumed":
            return "a new master took over"
        case "verdict_reached":
            return f"verdict: {event.detail}"
        case "action_intended":
            return f"going to {_named(event, 0)}"
        case "action_done":
            said = f" ({event.detail})" if event.detail else ""
            return f"{_named(event, 1 if event.succeeded else 2)}{said}"
        case "run_finished":
            on = f" with {nodes_text(event.nodes)}" if event.nodes else ""
            return f"{_DISPOSITIONS.get(event.detail, event.detail)}{on}"
        case "script_started":
            return f"{PurePath(event.detail).name or 'the script'} started"
        case _:
            return f"the script ended, {event.detail}"


def _named(event: Event, tense: int) -> str:
    words = _WORDS.get(event.action, (event.action,) * 3)[tense]
    who = "" if event.action in _ON_THE_JOB or not event.nodes else f" {nodes_text(event.nodes)}"
    return f"{words}{who}"
