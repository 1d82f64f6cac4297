# SPDX-License-Identifier: Apache-2.0
"""The pictures of the page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean

from benchmarks.year import kinds
from benchmarks.year.page import PARTS, of
from benchmarks.year.recording import Recording
from benchmarks.year.results import Done, Doubt

# Okabe and Ito's colours, which can be told apart without seeing red and green.
_COLOURS = (
    "#999999", "#e69f00", "#56b4e9", "#cc79a7", "#0072b2", "#009e73", "#d55e00", "#000000",
)  # fmt: skip
_TEXT, _GRID = "#263238", "#cfd8dc"


def ratio(done: Sequence[Done]) -> str:
    """Return a picture of useful of allocated node-hours by size, a line for each policy."""
    parts_of = [
        part
        for part in PARTS
        if part.doubt is Doubt.NONE and part.base == "plain" and not part.days
    ]
    sizes = sorted({part.nodes for part in parts_of})
    policies = list(dict.fromkeys(name for part in parts_of for name in part.policies))
    means = {
        (part.nodes, name): mean(each.figures["ratio"] for each in here)
        for part in reversed(parts_of)
        for name in part.policies
        if (here := of(done, name, part))
    }
    width, height, left, right, top, bottom = 720, 330, 60, 150, 40, 50
    shown = [
        [(place, means[nodes, name]) for place, nodes in enumerate(sizes) if (nodes, name) in means]
        for name in policies
    ]
    values = [value for line in shown for _, value in line] or [0.0]
    low = min(95.0, 5.0 * (min(values) // 5))
    x_step = (width - left - right) / max(1, len(sizes) - 1)

    def y(value: float) -> float:
        return top + (100 - value) / (100 - low) * (height - top - bottom)

    parts = [_text(left, 22, "Useful of allocated node-hours, %", weight=600)]
    marks = range(int(low), 101, 5 if low < 90 else 2)
    parts += [_line(left, y(mark), width - right, y(mark), _GRID, 1) for mark in marks]
    parts += [_text(left - 8, y(mark) + 4, str(mark), anchor="end") for mark in marks]
    parts += [
        _text(left + place * x_step, height - 24, f"{nodes:,}", anchor="middle")
        for place, nodes in enumerate(sizes)
    ]
    parts.append(_text(left, height - 6, "nodes"))
    ends = _apart([(y(line[-1][1]), number) for number, line in enumerate(shown) if line])
    for number, (policy, line) in enumerate(zip(policies, shown, strict=True)):
        colour = _COLOURS[number % len(_COLOURS)]
        spots = [(left + place * x_step, y(value)) for place, value in line]
        parts += [_line(*first, *second, colour, 2.5) for first, second in pairwise(spots)]
        parts += [f'<circle cx="{x:.1f}" cy="{at:.1f}" r="4" fill="{colour}"/>' for x, at in spots]
        if spots:
            parts.append(
                _text(width - right + 14, ends[number] + 4, policy, fill=colour, weight=600)
            )
    return _svg(width, height, "Useful of allocated node-hours by size and policy", parts)


def _apart(wanted: Sequence[tuple[float, int]], least: float = 16.0) -> dict[int, float]:
    """Return where labels stand that would cover each other."""
    found: dict[int, float] = {}
    last = -least
    for at, number in sorted(wanted):
        last = max(at, last + least)
        found[number] = last
    return found


_WEEK_D = 7.0
_SHOWN_KINDS = ("memory", "link", "loaded", "unknown", "board")


def faults(recording: Recording) -> str:
    """Return a picture of how many faults each week of the recording has, by kind."""
    weeks = int(recording.days // _WEEK_D) + 1
    counts = [[0] * weeks for _ in (*_SHOWN_KINDS, "others")]
    for of_node in recording.faults.values():
        for fault in of_node:
            kind = kinds.kind_of(fault.what)
            row = _SHOWN_KINDS.index(kind) if kind in _SHOWN_KINDS else len(_SHOWN_KINDS)
            counts[row][int(fault.start_d // _WEEK_D)] += 1
    width, height, left, top, bottom = 720, 280, 44, 60, 34
    most = max(1, *map(sum, zip(*counts, strict=True)))
    step = (width - left - 12) / weeks
    scale = (height - top - bottom) / most
    parts = [_text(left, 22, f"Faults of {recording.nodes} nodes in each week", weight=600)]
    for row, name in enumerate((*_SHOWN_KINDS, "others")):
        x = left + row * 104
        parts.append(f'<rect x="{x}" y="34" width="11" height="11" fill="{_COLOURS[row]}"/>')
        parts.append(_text(x + 16, 44, name))
    for mark in range(0, most + 1, 10):
        at = height - bottom - mark * scale
        parts.append(_line(left, at, width - 12, at, _GRID, 1))
        parts.append(_text(left - 8, at + 4, str(mark), anchor="end"))
    for week in range(weeks):
        base = float(height - bottom)
        for row, of_kind in enumerate(counts):
            tall = of_kind[week] * scale
            if tall:
                base -= tall
                parts.append(
                    f'<rect x="{left + week * step:.1f}" y="{base:.1f}" width="{step - 1:.1f}"'
                    f' height="{tall:.1f}" fill="{_COLOURS[row]}"/>'
                )
    parts.append(_text(left, height - 12, "first week"))
    parts.append(_text(width - 12, height - 12, f"week {weeks}", anchor="end"))
    return _svg(width, height, "Faults of the recording by week and kind", parts)


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" role="img" font-family="system-ui, sans-serif" font-size="13">'
    )
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{title}</title>", ground, *parts, "</svg>", ""])


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", fill: str = _TEXT, weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}"'
        f' font-weight="{weight}">{text}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
        f' stroke-width="{width:g}"/>'
    )
