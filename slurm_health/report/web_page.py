# SPDX-License-Identifier: Apache-2.0
"""A job's report as one page of HTML: it needs no network, no script and no other file.

jinja2 fills `page.html` and makes every name and message harmless: they come from journals.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

import jinja2

from slurm_health import __version__
from slurm_health.records.text import duration_text, one_line
from slurm_health.records.verdict import Outcome
from slurm_health.report import sentences, tables
from slurm_health.report.layout import Tinted, number_text
from slurm_health.report.story import Phase, Run, Story
from slurm_health.report.summary import Summary, summary_of

_LIFE = 1000.0  # units of the picture of a life; each part has at least:
_LEAST_PART = 14.0
_LABELLED = 70.0  # units that a label within its part needs
_MATRIX = 640.0  # pixels that a matrix takes, as long as its cells are no larger or smaller than:
_LEAST_CELL, _LARGEST_CELL = 1.5, 48.0
_VISIBLE = 6.0  # pixels of a cell that has to stand out among thousands
_LABELS = 32  # of an axis
_LINE = 12.0  # pixels that a label needs
# Shares of the middle, below which a pair's bandwidth has the next darker colour.
_BINS = (0.5, 0.7, 0.85, 0.95)


class Part(NamedTuple):
    """A part of the picture of a life: where it is, in units, and what it is."""

    x: float
    width: float
    phase: str
    label: str
    title: str


class Mark(NamedTuple):
    """A cell of a matrix: where it is and how large, in pixels, its style, and what it says."""

    x: float
    y: float
    size: float
    style: str
    title: str


class Matrix(NamedTuple):
    """Every pair that was measured together, the bandwidth of its last round as a colour."""

    name: str
    nodes: int
    size: float
    cell: float
    marks: list[Mark]
    labels: list[tuple[float, str, str]]
    margin: float
    legend: list[tuple[str, str]]


def as_html(story: Story, *, made_at: str) -> str:
    """Return the page of a job; `made_at` is its last line's."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("slurm_health.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"line": one_line, "parts": _parts}
    summary = summary_of(story)
    matrices = [(run, matrix) for run in story.runs if (matrix := matrix_of(run))]
    bad = [m for run, m in matrices if run.paths or any(node.is_bad for node in run.nodes)]
    return environment.get_template("page.html").render(
        title=tables.title_of(story),
        severity=summary.headline.severity.value,
        summary=tables.summary_rows(story),
        unseen=story.last.unseen,
        missing=[lack for run in story.runs for lack in run.missing],
        life=life_of(story, summary),
        matrix=next(reversed(bad or [matrix for _, matrix in matrices]), None),
        tables=[t for t in tables.tables_of(story, verbose=True) if len(t.rows) > 1],
        version=__version__,
        made_at=made_at,
    )


def _parts(cell: str | Tinted) -> tuple[str, str, str]:
    """Return the severity of a cell, its coloured head, and the rest of it."""
    if isinstance(cell, Tinted):
        return cell.severity.value, cell.text[: cell.head], cell.text[cell.head :]
    return "", "", cell


def life_of(story: Story, summary: Summary) -> list[Part]:
    """Return the picture of a job's life, from the queue to its end.

    A part has a least width, and a share of the rest by its time, so that a check of seconds stays
    visible beside a training of days; its label has the time.
    """
    phases: list[tuple[int, Phase]] = []
    for run in story.runs:
        for phase in run.life:
            if phases and phase.phase != "hang" and phase.begin_s - phases[-1][1].end_s > 1.0:
                gap = Phase(phase="pause", begin_s=phases[-1][1].end_s, end_s=phase.begin_s)
                phases.append((run.attempt, gap))
            phases.append((run.attempt, phase))
    spans = [phase for _, phase in phases if phase.phase != "hang"]
    total_s = sum(max(0.0, phase.end_s - phase.begin_s) for phase in spans) or 1.0
    room = max(0.0, _LIFE - _LEAST_PART * len(spans))
    parts: list[Part] = []
    x = 0.0
    for attempt, phase in phases:
        took_s = max(0.0, phase.end_s - phase.begin_s)
        took = duration_text(took_s)
        title = f"attempt {attempt + 1}: {phase.phase}, {took}"
        if phase.phase == "hang" and parts:
            before = next(p for p in reversed(parts) if p.phase != "hang")
            of = next(p for _, p in phases if p.phase == "training" and p.end_s >= phase.begin_s)
            per_s = before.width / max(1e-9, of.end_s - of.begin_s)
            left = before.x + max(0.0, phase.begin_s - of.begin_s) * per_s
            wide = max(_LEAST_PART / 2, min(took_s * per_s, before.x + before.width - left))
            left = min(left, before.x + before.width - wide)
            parts.append(Part(left, wide, "hang", "hang" if wide > _LABELLED else "", title))
            continue
        width = _LEAST_PART + room * took_s / total_s
        label = f"{phase.phase} {took}" if width > _LABELLED else ""
        parts.append(Part(round(x, 1), round(width, 1), phase.phase, label, title))
        x += width
    end = f"{summary.outcome}: {summary.headline.text}"
    return [*parts, Part(_LIFE, _LEAST_PART, summary.headline.severity, "", end)] if parts else []


def matrix_of(run: Run) -> Matrix | None:
    """Return the pairs of a check, None if none was tried."""
    place = {node.node: number for number, node in enumerate(run.nodes)}
    pairs = {
        tuple(sorted(group.nodes, key=place.__getitem__)): (measured.name, group)
        for measured in run.rounds
        for group in measured.groups
        if len(group.nodes) == 2 and {*group.nodes} <= place.keys()
    }
    if not pairs:
        return None
    cell = min(_LARGEST_CELL, max(_LEAST_CELL, _MATRIX / len(place)))
    values = [g.allgather_gb_per_s for _, g in pairs.values() if g.allgather_gb_per_s is not None]
    middle = median(values) if values else 0.0
    marks: list[Mark] = []
    for (first, second), (name, group) in pairs.items():
        value, outcome = group.allgather_gb_per_s, group.outcome
        style = f"b{sum(value < share * middle for share in _BINS)}" if value is not None else "a"
        figure = f"{number_text(value)} GB/s" if value is not None else "not measured"
        if outcome in (Outcome.FAILED, Outcome.TIMED_OUT):
            style, figure = "c", outcome.value.replace("_", " ")
        # Bad pairs are drawn larger, to stand out among those of hundreds of nodes.
        size = max(cell, _VISIBLE) if style > "b2" else max(cell, _LEAST_CELL)
        less = (size - cell) / 2
        title = f"{first} and {second}, {name}: {figure}"
        for row, column in ((first, second), (second, first)):
            x, y = place[column] * cell - less, place[row] * cell - less
            marks.append(Mark(round(x, 1), round(y, 1), round(size, 1), style, title))
    ends = {end for path in run.paths for end in path.ends}
    bad = [n for n, node in enumerate(run.nodes) if node.is_bad or node.node in ends]
    chosen: dict[int, float] = {}
    for number in (*bad, *range(0, len(place), max(1, -(-len(place) // _LABELS)))):
        at = round((number + 0.5) * cell, 1)
        if all(abs(at - other) >= _LINE for other in chosen.values()):
            chosen[number] = at
    shares = list(zip(range(5), [*_BINS[::-1], 0.0], strict=True))
    legend = [(f"b{n}", f"from {number_text(s * middle)} GB/s" if s else "less") for n, s in shares]
    return Matrix(
        name=sentences.attempt_text(run.attempt, run.check),
        nodes=len(place),
        size=round(cell * len(place), 1),
        cell=round(cell, 3),
        marks=sorted(marks, key=lambda mark: mark.style),
        labels=[
            (at, run.nodes[n].node, sentences.SEVERITIES[run.nodes[n].level] if n in bad else "")
            for n, at in sorted(chosen.items())
        ],
        margin=20.0 + 7 * min(18, max(len(node.node) for node in run.nodes)),
        legend=[*legend, ("c", "failed or timed out"), ("a", "not measured")],
    )
