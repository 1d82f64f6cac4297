# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report's page, as numbers: where each mark is, and what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from slurm_health.core.localize.settings import USUAL, Device
from slurm_health.core.verdict import Level, Outcome
from slurm_health.report.figures import ALLGATHER, MATMUL, figures_by_round, unit_of
from slurm_health.report.model import NodeReport, RunReport
from slurm_health.report.phrases import number_text

_MATRIX = 640.0  # pixels that a matrix takes, as long as its cells are no larger or smaller than:
_LEAST_CELL, _LARGEST_CELL = 1.5, 28.0
_DRAWN, _SEEN = 2.0, 6.0  # pixels of a cell at least; of one that is to be found
_LABELS = 24  # of an axis
_LINE = 12.0  # pixels that a label needs
# Shares of the middle, below which a pair's bandwidth has the next darker colour.
_BINS = (0.5, 0.7, 0.85, 0.95)
_CHART_WIDTH, _CHART_HEIGHT = 640.0, 200.0
_SPAN_WIDTH, _ROW = 440.0, 18.0


@dataclass(frozen=True, kw_only=True)
class Mark:
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
class Matrix:
    """Every pair that was measured together, the bandwidth of its last round as a colour."""

    size: float
    cell: float
    cells: tuple[Mark, ...]
    labels: tuple[Label, ...]
    legend: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure of every node, as a dot each, with the limit below which a node is slow."""

    title: str
    width: float
    height: float
    dots: tuple[Mark, ...]
    scale: tuple[Label, ...]
    limit_y: float | None
    limit: str


@dataclass(frozen=True, kw_only=True)
class Span:
    """When a check did what: a bar for each round and a mark for each event, in rows."""

    width: float
    height: float
    bars: tuple[Mark, ...]
    ticks: tuple[Label, ...]


def matrix_of(run: RunReport) -> Matrix | None:
    """Return the pairs of a check, None where none was tried."""
    place = {node.node: number for number, node in enumerate(run.nodes)}
    figures = figures_by_round(run.samples)
    pairs: dict[tuple[str, str], tuple[int, Outcome | None, float | None]] = {}
    for each in run.each_round:
        for group in each.groups:
            if len(group.nodes) == 2 and set(group.nodes) <= place.keys():
                first, second = sorted(group.nodes, key=place.__getitem__)
                found = figures.get((each.round, first), {}).get(ALLGATHER)
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
            Mark(x=x * cell, y=y * cell, width=cell, height=cell, style=style, title=title)
            for x, y in (
                (place[first], place[second]),
                (place[second], place[first]),
            )
        ]
    # What is not well is drawn last and larger, or nobody would see it among hundreds of nodes.
    cells.sort(key=lambda mark: mark.style)
    cells = [_enlarged(mark) for mark in cells]
    return Matrix(
        size=round(cell * len(place), 1),
        cell=cell,
        cells=tuple(cells),
        labels=_labels(run.nodes, cell),
        legend=_legend(middle),
    )


def _enlarged(mark: Mark) -> Mark:
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


def _labels(nodes: Sequence[NodeReport], cell: float) -> tuple[Label, ...]:
    """Return the names that have room beside a matrix; nodes that are not well come first."""
    places = [round((number + 0.5) * cell, 1) for number in range(len(nodes))]
    bad = [number for number, node in enumerate(nodes) if _is_unwell(node)]
    step = max(1, -(-len(nodes) // _LABELS))
    found: dict[int, float] = {}
    for number in (*bad, *range(0, len(nodes), step)):
        if all(abs(places[number] - place) >= _LINE for place in found.values()):
            found[number] = places[number]
    return tuple(
        Label(at=place, text=nodes[number].node, style=_level_of(nodes[number]))
        for number, place in sorted(found.items())
    )


def _is_unwell(node: NodeReport) -> bool:
    return node.level not in (Level.HEALTHY, None)


def _level_of(node: NodeReport) -> str:
    return node.level.value if node.level else "unjudged"


def charts_of(run: RunReport) -> list[Chart]:
    """Return the charts of a check: bandwidth and matrix products of every node."""
    device = _device(run)
    usual = USUAL[device]
    settings = run.started.settings if run.started else {}
    found = []
    for probe, name, floor in (
        (ALLGATHER, "network_floor", usual.network_floor),
        (MATMUL, "compute_floor", usual.compute_floor),
    ):
        chosen = settings.get(name)
        least = chosen if isinstance(chosen, float) else floor
        values = _values(run, probe)
        if values:
            found.append(_chart(run, probe, values, least))
    return found


def _device(run: RunReport) -> Device:
    """Return what a check's nodes computed with: only accelerators have names of their own."""
    watched = any(node.hardware and node.hardware.devices for node in run.nodes)
    models = {node.hardware.model for node in run.nodes if node.hardware}
    cpu = any("thread" in model for model in models)
    return Device.ACCELERATOR if watched or not cpu else Device.CPU


def _values(run: RunReport, probe: str) -> dict[str, float]:
    """Return the lowest figure of each node that has one."""
    return {
        node.node: min(figure.values)
        for node in run.nodes
        for figure in node.figures
        if figure.probe == probe and figure.values
    }


def _chart(run: RunReport, probe: str, values: Mapping[str, float], floor: float) -> Chart:
    healthy = [values[n.node] for n in run.nodes if n.level is Level.HEALTHY and n.node in values]
    middle = median(healthy or values.values())
    limit = middle / (1 + floor)
    top = max(values.values()) * 1.08
    unit, per = unit_of(probe), 1.0
    if unit == "GFLOP/s" and top >= 1000:
        unit, per = "TFLOP/s", 1000.0
    step = _CHART_WIDTH / max(1, len(run.nodes))
    dots = [
        Mark(
            x=round((number + 0.5) * step, 1),
            y=round(_CHART_HEIGHT * (1 - values.get(node.node, 0.0) / top), 1),
            style=_level_of(node),
            title=f"{node.node}: "
            + (
                f"{number_text(values[node.node] / per)} {unit}"
                if node.node in values
                else "not measured"
            ),
        )
        for number, node in enumerate(run.nodes)
        if node.node in values or _is_unwell(node)
    ]
    dots.sort(key=lambda dot: dot.style not in ("healthy", "unjudged"))
    scale = tuple(
        Label(at=round(_CHART_HEIGHT * (1 - share), 1), text=number_text(share * top / per))
        for share in (0.0, 0.5, 1.0)
    )
    return Chart(
        title=f"{probe}, {unit}: the lowest of each node",
        width=_CHART_WIDTH,
        height=_CHART_HEIGHT,
        dots=tuple(dots),
        scale=scale,
        limit_y=round(_CHART_HEIGHT * (1 - limit / top), 1),
        limit=(
            f"{number_text(limit / per)} {unit}, for which it takes {100 * floor:.0f} % longer than"
            f" at the healthy nodes' median of {number_text(middle / per)}"
        ),
    )


def span_of(run: RunReport) -> Span | None:
    """Return when a check did what, None where nothing is known of it."""
    rows = [
        (each.after_s, each.duration_s, f"round {each.round} {each.phase}", "round")
        for each in run.each_round
    ]
    if run.duration_s is not None:
        rows.insert(0, (0.0, run.duration_s, "check, to its verdict", "check"))
    acts = [event for event in run.timeline if event.what.startswith("action_done")]
    rows += [(event.after_s, 0.0, f"{event.action} done", "act") for event in acts]
    if not rows:
        return None
    end_s = max(after_s + (took_s or 0.0) for after_s, took_s, _, _ in rows) or 1.0
    scale = _SPAN_WIDTH / end_s
    bars = [
        Mark(
            x=round(max(0.0, after_s) * scale, 1),
            y=number * _ROW,
            width=round(max(3.0, (took_s or 0.0) * scale), 1),
            height=_ROW - 4,
            style=style,
            title=f"{name}, {took_s:.1f} s" if took_s else f"{name}, at {after_s:.1f} s",
        )
        for number, (after_s, took_s, name, style) in enumerate(rows)
    ]
    ticks = [
        Label(at=round(share * _SPAN_WIDTH, 1), text=f"{share * end_s:.1f} s")
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    return Span(width=_SPAN_WIDTH, height=len(rows) * _ROW, bars=tuple(bars), ticks=tuple(ticks))
