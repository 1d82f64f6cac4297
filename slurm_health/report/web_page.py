# SPDX-License-Identifier: Apache-2.0
"""A job's report as one page of HTML: it needs no network, no script and no other file.

jinja2 fills `page.html` and makes every name and message harmless: they come from journals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jinja2

from slurm_health import __version__
from slurm_health.records.probe_catalog import ALLGATHER, MATMUL
from slurm_health.records.text import one_line
from slurm_health.records.verdict import Level
from slurm_health.report import details, table, timeline
from slurm_health.report.charts import Matrix, matrix_of
from slurm_health.report.layout import NOTHING, range_text
from slurm_health.report.model import JobReport, NodeReport, RunReport
from slurm_health.report.phrases import (
    WORST_FIRST,
    attempt_text,
    effort_text,
    moment_text,
    nodes_text,
)
from slurm_health.report.post_mortem import lines_while_training
from slurm_health.report.sentences import lines_of
from slurm_health.report.summary import summary_of

_CARDS = 48  # nodes that get a card each; the rest is named
_EVIDENCE = 40  # lines on a card
_PICTURED = 3  # checks: the last one, and the last of those that found something


@dataclass(frozen=True, kw_only=True)
class _Card:
    """One node, path or leaf that is not well."""

    name: str
    level: str
    reason: str
    part: str
    limits: tuple[str, ...]
    evidence: tuple[str, ...]
    more: int


@dataclass(frozen=True, kw_only=True)
class _Check:
    """One check: its line, its picture, what happened in it."""

    name: str
    facts: tuple[str, ...]
    missing: tuple[str, ...]
    matrix: Matrix | None
    events: tuple[tuple[str, str], ...]
    pictured: bool
    opened: bool
    monitor: tuple[tuple[str, str], ...]
    post_mortem: tuple[tuple[str, str], ...]


def as_html(report: JobReport, *, made_at: str) -> str:
    """Return the page.

    Args:
        report: what to show.
        made_at: when that was, for the page's last line.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("slurm_health.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["line"] = one_line
    bad = [
        node
        for level in WORST_FIRST
        for node in report.nodes
        if node.level is level and level not in (Level.HEALTHY, None)
    ]
    last = report.runs[-1:]
    unwell = [run for run in report.runs if _is_unwell(run)]
    worth = sorted(report.runs, key=lambda run: run in last or run in unwell)
    pictured = {run.label for run in worth[-_PICTURED:]}
    opened = {run.label for run in unwell[-1:] or last}
    return environment.get_template("page.html").render(
        report=report,
        place="/".join(part for part in (report.cluster, report.partition) if part),
        when=_when(report.runs),
        summary=summary_of(report).rows(),
        counts=_counts(report.nodes),
        cards=[*map(partial(_card, report), bad[:_CARDS]), *_links(report)],
        others=nodes_text(node.node for node in bad[_CARDS:]),
        checks=[
            _check(run, pictured=run.label in pictured, opened=run.label in opened)
            for run in report.runs
        ],
        nodes=[_row(node) for node in report.nodes],
        probes=[ALLGATHER, MATMUL],
        version=__version__,
        made_at=made_at,
    )


def _counts(nodes: Sequence[NodeReport]) -> list[tuple[str, int]]:
    counts = [
        (level.value if level else "unjudged", sum(node.level is level for node in nodes))
        for level in WORST_FIRST
    ]
    return [(level, count) for level, count in counts if count]


def _when(runs: Sequence[RunReport]) -> list[str]:
    """Return when a job was checked first, and where and how long it was if only once."""
    began = [moment_text(runs[0].started_s)] if runs and runs[0].started_s else []
    if len(runs) != 1:
        return began
    (run,) = runs
    return [*began, *filter(None, (nodes_text(n.node for n in run.nodes), effort_text(run)))]


def _card(report: JobReport, node: NodeReport) -> _Card:
    assert node.verdict is not None
    evidence = node.verdict.evidence
    devices = node.hardware.devices if node.hardware else ()
    said = tuple(text for device in devices for text in device.said)
    return _Card(
        name=node.node,
        level=node.verdict.level.value,
        reason=node.verdict.reason,
        part=details.part_text(node),
        limits=tuple(details.limits(node, _run_of(report, node))),
        evidence=(*said, *evidence[-_EVIDENCE:]),
        more=max(0, len(evidence) - _EVIDENCE),
    )


def _run_of(report: JobReport, node: NodeReport) -> RunReport:
    return next(run for run in report.runs if run.label == node.label)


def _links(report: JobReport) -> list[_Card]:
    return [
        _Card(
            name=f"{kind} {NOTHING.join(link.ends)}",
            level=link.level.value,
            reason=link.reason,
            part="the nodes at its ends are not at fault",
            limits=(),
            evidence=link.evidence[-_EVIDENCE:],
            more=max(0, len(link.evidence) - _EVIDENCE),
        )
        for kind, links in (("path", report.paths), ("leaf", report.leaves))
        for link in links
    ]


def _is_unwell(run: RunReport) -> bool:
    links = any(link.level is not Level.HEALTHY for link in (*run.paths, *run.leaves))
    return links or any(node.level not in (Level.HEALTHY, None) for node in run.nodes)


def _check(run: RunReport, *, pictured: bool, opened: bool) -> _Check:
    return _Check(
        name=attempt_text(run),
        facts=tuple(table.facts_of(run)),
        missing=run.missing,
        matrix=matrix_of(run) if pictured else None,
        events=tuple((f"{after_s:.1f}", text) for after_s, text in timeline.events_of(run)),
        pictured=pictured,
        opened=opened,
        monitor=tuple(lines_while_training(run)),
        post_mortem=tuple(lines_of(run.post_mortem)) if run.post_mortem else (),
    )


def _row(node: NodeReport) -> tuple[str, str, list[str], str]:
    """Return a node's name, level, figures and reason."""
    shown = [range_text(node.figures.get(probe, ())) for probe in (ALLGATHER, MATMUL)]
    reason = node.verdict.reason if node.verdict else ""
    return node.node, node.level.value if node.level else "unjudged", shown, reason
