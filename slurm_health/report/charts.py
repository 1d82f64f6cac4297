# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report's page, as numbers: where each mark is, and what it says.

Places are in pixels; in the picture of when a check did what, in percent of its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from slurm_health.records.probe_catalog import ALLGATHER, MATMUL, unit_of
from slurm_health.records.verdict import Level, Outcome
from slurm_health.report.details import limit_of
from slurm_health.report.layout import number_text
from slurm_health.report.model import NodeReport, RunReport

_MATRIX = 640.0  # pixels that a matrix takes, as long as its cells are no larger or smaller than:
_LEAST_CELL, _LARGEST_CELL = 1.5, 56.0
_LARGE = 400.0  # pixels of a matrix that takes the room of two pictures
_DRAWN, _SEEN = 2.0, 6.0  # pixels of a cell at least; of one that is to be found
_LABELS = 24  # of an axis
_LINE = 12.0  # pixels that a label needs
# Shares of the middle, below which a pair's bandwidth has the next darker colour.
_BINS = (0.5, 0.7, 0.85, 0.95)
_CHART_WIDTH, _CHART_HEIGHT = 640.0, 200.0
_LEAST_WIDTH = 400.0  # at its least scale it fits a window of 400 pixels
_CHARACTER, _MOST_CHARACTERS = 7.5, 18  # of a node's name: its width, and how many are shown
_NAMES, _ROOM = 8, 60.0  # nodes that are all named below a chart; pixels that a name takes


@dataclass(frozen=True, kw_only=True)
class ChartMark:
    """A rectangle or a dot: its place in pixels, its style, and what it says when pointed at."""

    x: float
    y: float
    style: str
    title: str
    width: float = 0.0
    height: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Label:
    """A text beside a picture."""

    at: float
    text: str
    style: str = ""


@dataclass(frozen=True, kw_only=True)
class Named:
    """The name of a node in a chart."""

    at: float
    y: float
    text: str
    style: str = ""
    anchor: str = "middle"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Every pair that was measured together, the bandwidth of its last round as a colour."""

    nodes: int
    size: float
    cell: float
    large: bool
    cells: tuple[ChartMark, ...]
    labels: tuple[Label, ...]
    legend: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure of every node, as a dot each, with the limit below which a node is slow.

    Nodes that are not well are named; all of them where there is room. `hollow`: some of the dots
    stand for nodes that were not measured.
    """

    title: str
    width: float
    height: float
    dots: tuple[ChartMark, ...]
    labels: tuple[Named, ...]
    hollow: bool
    scale: tuple[Label, ...]
    limit_y: float | None
    limit: str


def matrix_of(run: RunReport) -> Matrix | None:
    """Return the pairs of a check, None where none was tried."""
    place = {node.node: number for number, node in enumerate(run.nodes)}
    pairs: dict[tuple[str, str], tuple[int, Outcome | None, float | None]] = {}
    for each in run.each_round:
        for group in each.groups:
            if len(group.nodes) == 2 and set(group.nodes) <= place.keys():
                first, second = sorted(group.nodes, key=place.__getitem__)
                found = run.measured.get((each.round, first), {}).get(ALLGATHER)
                pairs[first, second] = each.round, group.outcome, found
    if not pairs:
        return None
    cell = min(_LARGEST_CELL, max(_LEAST_CELL, _MATRIX / len(place)))
    values = [value for _, outcome, value in pairs.values() if value is not None]
    middle = median(values) if values else 0.0
    cells = []
    for (first, second), (number, outcome, value) in pairs.items():
        style = _style(outcome, value, middle)
        said = f"{number_text(value)} GB/s" if value is not None else _said(outcome)
        title = f"{first} and {second}, round {number}: {said}"
        cells += [
            ChartMark(x=x * cell, y=y * cell, width=cell, height=cell, style=style, title=title)
            for x, y in (
                (place[first], place[second]),
                (place[second], place[first]),
            )
        ]
    # What is not well is drawn last and larger, or it would not be seen among hundreds of nodes.
    cells.sort(key=lambda mark: mark.style)
    cells = [_enlarged(mark) for mark in cells]
    ends = frozenset(end for path in run.paths for end in path.ends)
    size = round(cell * len(place), 1)
    return Matrix(
        nodes=len(place),
        size=size,
        cell=cell,
        large=size > _LARGE,
        cells=tuple(cells),
        labels=_labels(run.nodes, cell, ends=ends),
        legend=_legend(middle),
    )


def _enlarged(mark: ChartMark) -> ChartMark:
    size = max(mark.width, _SEEN if mark.style > "b2" else _DRAWN)
    less = (size - mark.width) / 2
    return replace(mark, x=mark.x - less, y=mark.y - less, width=size, height=size)


def _style(outcome: Outcome | None, value: float | None, middle: float) -> str:
    """Return `b0` for a pair like most to `b4` for one at half of that; `c` where it failed."""
    if outcome in (Outcome.FAILED, Outcome.TIMED_OUT):
        return "c"
    if value is None:
        return "a"
    return f"b{sum(value < share * middle for share in _BINS)}"


def _said(outcome: Outcome | None) -> str:
    return outcome.value.replace("_", " ") if outcome else "no word yet"


def _legend(middle: float) -> tuple[tuple[str, str], ...]:
    shares = [*_BINS[::-1], 0.0]
    named = [
        (f"b{number}", f"from {number_text(share * middle)} GB/s" if share else "less")
        for number, share in enumerate(shares)
    ]
    return (*named, ("c", "failed or timed out"), ("a", "not measured"))


def _labels(nodes: Sequence[NodeReport], cell: float, *, ends: frozenset[str]) -> tuple[Label, ...]:
    """Return the names that have room beside a matrix.

    Nodes that are not well come first, and the ends of bad paths.
    """
    places = [round((number + 0.5) * cell, 1) for number in range(len(nodes))]
    bad = [number for number, node in enumerate(nodes) if _is_unwell(node) or node.node in ends]
    step = max(1, -(-len(nodes) // _LABELS))
    found: dict[int, float] = {}
    for number in (*bad, *range(0, len(nodes), step)):
        if all(abs(places[number] - place) >= _LINE for place in found.values()):
            found[number] = places[number]
    return tuple(
        Label(
            at=place,
            text=nodes[number].node,
            style=_level_of(nodes[number]) + (" end" if nodes[number].node in ends else ""),
        )
        for number, place in sorted(found.items())
    )


def _is_unwell(node: NodeReport) -> bool:
    return node.level not in (Level.HEALTHY, None)


def _level_of(node: NodeReport) -> str:
    return node.level.value if node.level else "unjudged"


def charts_of(run: RunReport) -> list[Chart]:
    """Return the charts of a check: bandwidth and matrix products of every node."""
    measured = ((probe, _values(run, probe)) for probe in (ALLGATHER, MATMUL))
    return [_chart(run, probe, values) for probe, values in measured if values]


def _values(run: RunReport, probe: str) -> dict[str, float]:
    """Return the lowest figure of each node that has one."""
    return {node.node: min(node.figures[probe]) for node in run.nodes if node.figures.get(probe)}


def _chart(run: RunReport, probe: str, values: Mapping[str, float]) -> Chart:
    allowed = limit_of(run, probe)
    healthy = [values[n.node] for n in run.nodes if n.level is Level.HEALTHY and n.node in values]
    middle = median(healthy or values.values())
    limit = middle / (1 + allowed.floor)
    top = max(values.values()) * 1.08
    unit, per = unit_of(probe), 1.0
    if unit == "GFLOP/s" and top >= 1000:
        unit, per = "TFLOP/s", 1000.0
    width = _width(run.nodes)
    texts = {node: f"{number_text(value / per)} {unit}" for node, value in values.items()}
    dots = _dots(run.nodes, {node: value / top for node, value in values.items()}, texts)
    labels = _names(run.nodes, dots, width)
    dots.sort(key=lambda dot: dot.style not in ("healthy", "unjudged"))
    scale = tuple(
        Label(at=round(_CHART_HEIGHT * (1 - share), 1), text=number_text(share * top / per))
        for share in (0.0, 0.5, 1.0)
    )
    return Chart(
        title=f"{probe}, {unit}: the lowest of each node",
        width=width,
        height=_CHART_HEIGHT,
        dots=tuple(dots),
        labels=tuple(labels),
        hollow=any("hollow" in dot.style for dot in dots),
        scale=scale,
        limit_y=round(_CHART_HEIGHT * (1 - limit / top), 1),
        limit=(
            f"{number_text(limit / per)} {unit}, the limit; the median of healthy nodes is"
            f" {number_text(middle / per)}, and a node is {allowed.text()}"
        ),
    )


def _dots(
    nodes: Sequence[NodeReport], heights: Mapping[str, float], texts: Mapping[str, str]
) -> list[ChartMark]:
    """Return a dot for each node that was measured, and a hollow one for others that are not well.

    `heights` are shares of the chart's.
    """
    step = _width(nodes) / max(1, len(nodes))
    return [
        ChartMark(
            x=round((number + 0.5) * step, 1),
            y=round(_CHART_HEIGHT * (1 - heights.get(node.node, 0.0)), 1),
            style=_level_of(node) + ("" if node.node in heights else " hollow"),
            title=f"{node.node}: {texts.get(node.node, 'not measured')}",
        )
        for number, node in enumerate(nodes)
        if node.node in heights or _is_unwell(node)
    ]


def _width(nodes: Sequence[NodeReport]) -> float:
    """Return the width of a chart: of few nodes no more than their names need."""
    if len(nodes) > _NAMES:
        return _CHART_WIDTH
    longest = min(_MOST_CHARACTERS, max((len(node.node) for node in nodes), default=0))
    needed = len(nodes) * (longest + 2) * _CHARACTER
    return min(_CHART_WIDTH, max(_LEAST_WIDTH, needed))


def _names(nodes: Sequence[NodeReport], dots: Sequence[ChartMark], width: float) -> list[Named]:
    """Return the names below a chart, or beside the dots of nodes that are not well."""
    if len(nodes) <= _NAMES:
        step = width / max(1, len(nodes))
        return [
            Named(
                at=round((number + 0.5) * step, 1),
                y=_CHART_HEIGHT + 14,
                text=node.node,
                style=_level_of(node),
            )
            for number, node in enumerate(nodes)
        ]
    found: list[Named] = []
    for dot in dots:
        style = dot.style.partition(" ")[0]
        near = any(abs(each.at - dot.x) < _ROOM and abs(each.y - dot.y) < _LINE for each in found)
        if style in {"healthy", "unjudged"} or near:
            continue
        left = dot.x > width - _ROOM
        found.append(
            Named(
                at=dot.x + (-8 if left else 8),
                y=dot.y - 6,
                text=dot.title.partition(":")[0],
                style=style,
                anchor="end" if left else "start",
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Span:
    """When a check did what: a bar for each round and a mark for each event, in rows."""

    bars: tuple[ChartMark, ...]
    ticks: tuple[Label, ...]


def span_of(run: RunReport) -> Span | None:
    """Return when a check did what, None where nothing is known of it."""
    rows = [
        (each.after_s, each.duration_s, f"round {each.round} {each.phase}".rstrip(), "round")
        for each in run.each_round
    ]
    if run.duration_s is not None:
        rows.insert(0, (0.0, run.duration_s, "check, to its verdict", "check"))
    acts = [event for event in run.timeline if event.what.startswith("action_done")]
    rows += [(event.after_s, 0.0, f"{event.action} done", "act") for event in acts]
    if not rows:
        return None
    end_s = max(after_s + (took_s or 0.0) for after_s, took_s, _, _ in rows) or 1.0
    scale = 100 / end_s
    bars = [
        ChartMark(
            x=round(max(0.0, after_s) * scale, 1),
            y=number,
            width=round((took_s or 0.0) * scale, 1),
            style=style,
            title=f"{name}, {took_s:.1f} s" if took_s else f"{name}, at {after_s:.1f} s",
        )
        for number, (after_s, took_s, name, style) in enumerate(rows)
    ]
    ticks = [
        Label(at=round(share * 100, 1), text=f"{share * end_s:.1f} s")
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    return Span(bars=tuple(bars), ticks=tuple(ticks))
