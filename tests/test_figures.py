# SPDX-License-Identifier: Apache-2.0
"""The figures of the pages, and the numbers beside them."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

mpl = pytest.importorskip("matplotlib", reason="the docs extra is not installed")

from tests.figures import drawn, rows_of  # noqa: E402

DOCS = Path(__file__).parents[1] / "docs"
FIGURES = sorted((DOCS / "figures").glob("*.svg"))
COUNTS = ("cases", "right", "undecided", "wrong", "innocent", "contested")


def test_every_committed_figure_is_what_its_data_draws() -> None:
    release = (DOCS / "figures/drawn-by").read_text().strip()
    if mpl.__version__ != release:
        pytest.skip(f"drawn by matplotlib {release}, not {mpl.__version__}")
    assert {path.name: path.read_text() for path in FIGURES} == drawn()


def test_a_page_shows_every_figure_with_words_for_those_who_cannot_see_it() -> None:
    pages = "\n".join(path.read_text() for path in DOCS.rglob("*.md"))
    for figure in FIGURES:
        shown = re.findall(rf"!\[([^\]]*)\]\([./]*figures/{figure.name}\)", pages)
        assert shown, f"no page shows {figure.name}"
        assert all(len(words.split()) >= 5 for words in shown), figure.name


@pytest.mark.parametrize("figure", FIGURES, ids=lambda path: path.stem)
def test_a_figure_has_colours_for_light_and_dark_readers_and_no_other(figure: Path) -> None:
    text = figure.read_text()
    ET.fromstring(text)

    style, rest = re.search(r"<style>(.*?)</style>", text, re.DOTALL), text
    assert style is not None
    assert "prefers-color-scheme:dark" in style[1]
    rest = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    assert set(re.findall(r"#[0-9a-f]{6}\b", rest)) <= {"#ffffff"}


def test_the_evidence_page_has_the_numbers_of_the_results() -> None:
    page = (DOCS / "explanation/evidence.md").read_text()
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    listed = [
        (re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", row[0]).partition(":")[0], *map(int, row[3:]))
        for row in cells
        if len(row) == 9 and row[0] != "source"
    ]

    assert listed == [(row["case"], *(row[name] for name in COUNTS)) for row in rows_of("evidence")]
    assert all(
        row["right"] + row["undecided"] + row["wrong"] + row["contested"] == row["cases"]
        for row in rows_of("evidence")
    )
