# SPDX-License-Identifier: Apache-2.0
"""Draw the figures of the pages from committed JSON: `make figures`.

Plots come from `benchmarks/results/*.json`, diagrams from `docs/figures/*.json`. Each SVG has the
colours of the reader's theme, light or dark, and the same input gives the same file
with the same release of matplotlib, which `docs/figures/drawn-by` names.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from slurm_health.report.read import load
from slurm_health.report.web_page import as_html
from tests.support.journals import write_requeued_job

PLACE = Path(__file__).parents[1] / "docs/figures"
RESULTS = Path(__file__).parents[1] / "benchmarks/results"
# By name: the colour that stands for it while drawing, in the light theme, and in the dark one.
COLOURS = {
    "ink": ("#010101", "#24292f", "#e6edf3"),
    "pale": ("#020202", "#6e7781", "#8d96a0"),
    "line": ("#030303", "#d0d7de", "#444c56"),
    "card": ("#040404", "#f6f8fa", "#22272e"),
    "ok": ("#050505", "#2e7d32", "#57ab5a"),
    "moves": ("#060606", "#1565c0", "#539bf5"),
    "doubt": ("#070707", "#b26a00", "#daaa3f"),
    "bad": ("#080808", "#c62828", "#f47067"),
}
INK, PALE, LINE, CARD, OK, MOVES, DOUBT, BAD = (names[0] for names in COLOURS.values())
_KINDS = {"ok": OK, "moves": MOVES, "doubt": DOUBT, "bad": BAD, "": LINE}
_A_DAY_S = 1_793_000_000.0  # in 2026
_SIZE = (120, 44)  # of a box without one
_STYLE: Any = {
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "grid.color": LINE,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "slurm-health",
    "text.color": INK,
    "xtick.color": PALE,
    "xtick.labelcolor": INK,
    "ytick.color": PALE,
    "ytick.labelcolor": INK,
}


def drawn() -> dict[str, str]:
    """Return every figure as SVG, by its file's name."""
    figures: dict[str, Callable[[], Figure]] = {
        "evidence.svg": evidence,
        "beside-dlrover.svg": beside_dlrover,
        "over-nodes.svg": over_nodes,
        "requeue.svg": requeue,
    }
    svgs = {}
    with mpl.rc_context(_STYLE):
        for name, draw in figures.items():
            svgs[name] = _svg(draw())
        for path in sorted(PLACE.glob("*.json")):
            svgs[f"{path.stem}.svg"] = _svg(diagram(json.loads(path.read_text())))
    return svgs


def _svg(figure: Figure) -> str:
    """Return a figure with the colours of both themes."""
    file = StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    light = "".join(f"--{name}:{colours[1]};" for name, colours in COLOURS.items())
    dark = "".join(f"--{name}:{colours[2]};" for name, colours in COLOURS.items())
    style = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    text = re.sub(r"( *<defs>)", rf" <style>{style}</style>\n\1", file.getvalue(), count=1)
    for name, (drawn_as, _, _) in COLOURS.items():
        text = text.replace(drawn_as, f"var(--{name})")
    text = re.sub(r"'[^']*Sans[^']*', ?", "", text)
    return re.sub(r" +$", "", text, flags=re.MULTILINE)


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the rows of a measurement."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())
    return rows


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


# --- plots ---------------------------------------------------------------------------------------


def evidence() -> Figure:
    """Draw, for every source of recordings, the share of what was named rightly."""
    rows = rows_of("evidence")[::-1]
    figure, axes = _axes(8.4, 0.27 * len(rows) + 0.7)
    left = [0.0] * len(rows)
    parts = (("right", OK), ("contested", PALE), ("undecided", DOUBT), ("wrong", BAD))
    for part, colour in parts:
        share = [100 * row[part] / row["cases"] for row in rows]
        axes.barh(range(len(rows)), share, left=left, color=colour, height=0.7, label=part)
        left = [a + b for a, b in zip(left, share, strict=True)]
    axes.set_yticks(range(len(rows)), [f"{row['case']}  ({row['cases']})" for row in rows])
    axes.set_xlabel("% of the cases; no innocent node or rank was accused in any")
    if any(row["innocent"] for row in rows):
        axes.set_xlabel("% of the cases")
    axes.tick_params(length=0)
    axes.set_xlim(0, 100)
    axes.margins(y=0.01)
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def beside_dlrover() -> Figure:
    """Draw the median and every run of a check, ours and DLRover's, as bars."""
    rows = [row for row in rows_of("check") if row["dlrover_times_s"]]
    light = {row["case"].removeprefix("light-"): row for row in rows_of("check")}
    figure, axes = _axes(8.4, 0.95 * len(rows) + 0.9)
    height = 0.27
    for place, row in enumerate(rows[::-1]):
        bars = (
            ("DLRover 0.6.1", row["dlrover_times_s"], PALE),
            ("with torch", row["times_s"], MOVES),
            ("light probes", light[row["case"]]["times_s"], OK),
        )
        for number, (label, times_s, colour) in enumerate(bars):
            y = place + (number - 1) * height
            named = label if place == 0 else None
            axes.barh(y, median(times_s), color=colour, height=0.9 * height, label=named)
            axes.plot(times_s, [y] * len(times_s), "|", color=INK, markersize=6)
    axes.set_yticks(range(len(rows)), [row["title"] for row in rows[::-1]])
    axes.set_xlabel("seconds to the verdict; a bar is the median, a line is a run")
    axes.tick_params(axis="y", length=0)
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), reverse=True)
    return figure


def over_nodes() -> Figure:
    """Draw how long a check takes over the number of its nodes, both axes logarithmic."""
    figure, axes = _axes(8.4, 4.0)
    simulated = rows_of("scale")
    for bad, colour in ((0, OK), (1, DOUBT)):
        rows = [row for row in simulated if row["bad %"] == bad]
        nodes = [row["nodes"] for row in rows]
        name = f"{bad} % bad" if bad else "healthy"
        verdicts_s = [row["verdict s"] for row in rows]
        axes.plot(nodes, verdicts_s, "o-", color=colour, label=f"simulated, {name}: to the verdict")
        beyond_s = [row["beyond s"] for row in rows]
        axes.plot(nodes, beyond_s, "o--", color=colour, label="of this, beyond measuring")
    real = [row for row in rows_of("check") if row["case"].startswith("light-healthy")]
    nodes = [int(row["case"].rpartition("-")[2]) for row in real]
    named = "real nodes, light probes: to the verdict"
    axes.plot(nodes, [median(row["times_s"]) for row in real], "s", color=MOVES, label=named)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("nodes")
    axes.set_ylabel("seconds")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(visible=True)
    axes.legend()
    return figure


def requeue() -> Figure:
    """Draw, for every run, how soon a job's script ran after the verdict."""
    rows = rows_of("acting")[::-1]
    figure, axes = _axes(8.4, 0.42 * len(rows) + 0.7)
    for place, row in enumerate(rows):
        axes.plot(row["times_s"], [place] * len(row["times_s"]), "o", color=MOVES, alpha=0.6)
    axes.set_yticks(range(len(rows)), [f"{row['title']}  ({len(row['times_s'])})" for row in rows])
    axes.set_xlabel(
        "seconds from the verdict to the first line of the user's script; a dot is a run"
    )
    axes.set_xlim(left=0)
    axes.margins(y=0.2)
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="y", length=0)
    return figure


# --- diagrams ------------------------------------------------------------------------------------


def diagram(spec: dict[str, Any]) -> Figure:
    """Draw boxes, dots, arrows and lines at given places.

    Args:
        spec: `size` in units of 0.01 inch, its origin at the top left; `boxes` by name, with
            `at` (centre), `size`, `text` and `kind`; `arrows` `between` names or points, with
            `text` beside one part; `texts` with `at` and `text`; `grids` with `at`, `cell`, `names`
            and `rows` of letters: `o` for a fast pair, `s` for a slow one.
    """
    width, height = spec["size"]
    figure = Figure(figsize=(width / 100, height / 100))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    boxes: dict[str, Any] = spec.get("boxes", {})
    for name, box in boxes.items():
        _box(axes, name, box)
    for arrow in spec.get("arrows", []):
        _arrow(axes, boxes, arrow)
    for grid in spec.get("grids", []):
        _grid(axes, grid)
    for note in spec.get("texts", []):
        x, y = note["at"]
        axes.text(
            x, y, note["text"], ha=note.get("align", "left"), va="center",
            color=PALE if note.get("pale") else INK, fontsize=note.get("font", 10),
            fontweight="bold" if note.get("bold") else "normal",
        )  # fmt: skip
    return figure


def _box(axes: Axes, name: str, box: dict[str, Any]) -> None:
    (x, y), kind = box["at"], _KINDS[box.get("kind", "")]
    width, height = box.get("size", _SIZE)
    radius = height / 2 if box.get("round") else 6
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2 + radius, y - height / 2 + radius),
            width - 2 * radius,
            max(0.1, height - 2 * radius),
            boxstyle=f"round,pad={radius}",
            edgecolor=kind,
            facecolor=kind if box.get("full") else CARD,
            linewidth=1.6,
        )
    )
    colour = CARD if box.get("full") else INK
    axes.text(x, y, box.get("text", name), ha="center", va="center", fontsize=10, color=colour)


def _grid(axes: Axes, grid: dict[str, Any]) -> None:
    (x, y), cell = grid["at"], grid["cell"]
    for place, (name, row) in enumerate(zip(grid["names"], grid["rows"], strict=True)):
        middle = (place + 0.5) * cell
        axes.text(x - 4, y + middle, name, ha="right", va="center", fontsize=7.5, color=PALE)
        axes.text(x + middle, y - 7, name, ha="center", va="center", fontsize=7.5, color=PALE)
        for other, letter in enumerate(row):
            colour = {"o": OK, "s": BAD}.get(letter, CARD)
            corner = (x + other * cell, y + place * cell)
            axes.add_patch(Rectangle(corner, cell - 2, cell - 2, facecolor=colour))


def _arrow(axes: Axes, boxes: dict[str, Any], arrow: dict[str, Any]) -> None:
    """Draw an arrow that leads through points; only its last part has a head."""
    ends = arrow["between"]
    centres = [boxes[end]["at"] if isinstance(end, str) else end for end in ends]
    sizes = [boxes[end].get("size", _SIZE) if isinstance(end, str) else (0, 0) for end in ends]
    for part in range(len(ends) - 1):
        begin = _edge(centres[part], sizes[part], centres[part + 1])
        end = _edge(centres[part + 1], sizes[part + 1], centres[part])
        is_last = part == len(ends) - 2
        axes.add_patch(
            FancyArrowPatch(
                begin,
                end,
                arrowstyle="-|>" if is_last and not arrow.get("plain") else "-",
                color=_KINDS[arrow["kind"]] if "kind" in arrow else PALE,
                linestyle="--" if arrow.get("dashed") else "-",
                mutation_scale=11,
                linewidth=arrow.get("width", 1.3),
                shrinkA=0,
                shrinkB=1 if is_last else 0,
            )
        )
        if part == arrow.get("text_at", 0) and "text" in arrow:
            dx, dy = arrow.get("shift", (0, -9))
            x, y = (begin[0] + end[0]) / 2 + dx, (begin[1] + end[1]) / 2 + dy
            axes.text(x, y, arrow["text"], ha="center", va="center", fontsize=8.5, color=PALE)


def _edge(
    centre: Sequence[float], size: Sequence[float], towards: Sequence[float]
) -> tuple[float, float]:
    """Return where the line from a box's centre leaves it."""
    dx, dy = towards[0] - centre[0], towards[1] - centre[1]
    if not any(size):
        return centre[0], centre[1]
    reach = min(
        size[0] / 2 / abs(dx) if dx else float("inf"),
        size[1] / 2 / abs(dy) if dy else float("inf"),
    )
    return centre[0] + dx * reach, centre[1] + dy * reach


def photograph(browser: str, path: Path) -> None:
    """Write a picture of `report --html`, of a job that was requeued."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_requeued_job(directory, started_s=_A_DAY_S, drains=False)
        page = directory / "report.html"
        page.write_text(as_html(load(directory, "12"), made_at="2026-11-28 12:00"))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += ["--window-size=1000,900", f"--screenshot={path}", page.as_uri()]
        subprocess.run([browser, *options], check=True, capture_output=True, timeout=120)


def main() -> int:
    """Write every figure; print the names of those that changed."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no chromium: the picture of a report stays as it is", file=sys.stderr)
    else:
        photograph(browser, PLACE / "report.png")
    for name, svg in drawn().items():
        path = PLACE / name
        if not path.exists() or path.read_text() != svg:
            path.write_text(svg)
            print(f"{path.relative_to(PLACE.parents[1])} changed")
    (PLACE / "drawn-by").write_text(f"{mpl.__version__}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
