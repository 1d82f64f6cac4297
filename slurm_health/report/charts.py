# SPDX-License-Identifier: Apache-2.0
"""The picture of a report's page, as numbers: where each mark is in pixels, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from slurm_health.records.probe_catalog import ALLGATHER
from slurm_health.records.verdict import Level, Outcome
from slurm_health.report.layout import number_text
from slurm_health.report.model import NodeReport, RunReport

_MATRIX = 640.0  # pixels that a matrix takes, as long as its cells are no larger or smaller than:
_LEAST_CELL, _LARGEST_CELL = 1.5, 56.0
_DRAWN, _SEEN = 2.0, 6.0  # pixels of a cell at least; of one that is to be found
_LABELS = 24  # of an axis
_LINE = 12.0  # pixels that a label needs
# Shares of the middle, below which a pair's bandwidth has the next darker colour.
_BINS = (0.5, 0.7, 0.85, 0.95)


@dataclass(frozen=True, kw_only=True)
class ChartMark:
    """A rectangle: its place in pixels, its style, and what it says when pointed at."""

    x: float
    y: float
    style: str
    title: str
    width: float
    height: float


@dataclass(frozen=True, kw_only=True)
class Label:
    """A text beside a picture."""

    at: float
    text: str
    style: str = ""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Every pair that was measured together, the bandwidth of its last round as a colour."""

    nodes: int
    size: float
    cell: float
    cells: tuple[ChartMark, ...]
    labels: tuple[Label, ...]
    legend: tuple[tuple[str, str], ...]


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
