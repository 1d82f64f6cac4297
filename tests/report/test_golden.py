# SPDX-License-Identifier: Apache-2.0
"""The pages of a report are as they are kept, and hold what every page of it must hold."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.records.text import one_line
from slurm_health.records.verdict import Level
from slurm_health.report import export
from slurm_health.report.jobs import in_short
from slurm_health.report.layout import Page
from slurm_health.report.read import load
from slurm_health.report.story import Story
from slurm_health.report.text import job_text
from tests import golden
from tests.report.stories import STORIES
from tests.support.journals import write_requeued_job

SMALL = sorted(set(STORIES) - {"large"})
LINES_OF_A_SCREEN = 50
WEARS_MARKUP = {"hostile"}  # a word of it is longer than a line


def story_of(root: Path, name: str) -> Story:
    now_s = STORIES[name](root)
    return load(root, "12", now_s=now_s)


def test_the_pages_are_as_they_are_kept() -> None:
    found = list(golden.differences())

    assert found == [], "\n".join([*found, "", "to accept it: python -m tests.golden --accept"])


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("name", sorted(set(SMALL) - WEARS_MARKUP))
def test_a_report_fits_its_terminal(tmp_path: Path, name: str, width: int) -> None:
    for verbose in (False, True):
        text = job_text(story_of(tmp_path / str(verbose), name), Page(width=width), verbose=verbose)

        assert max(map(len, text.split("\n"))) <= width
        assert all(line == line.rstrip() for line in text.split("\n"))


@pytest.mark.parametrize("name", SMALL)
def test_nothing_in_a_report_acts_on_a_terminal(tmp_path: Path, name: str) -> None:
    story = story_of(tmp_path, name)
    texts = [job_text(story, Page(), verbose=True), export.as_json(export.job_document(story))]

    assert all(line.isprintable() for text in texts for line in text.split("\n"))
    assert job_text(story, Page(unicode=False), verbose=True).isascii()


@pytest.mark.heavy
def test_the_report_of_4096_nodes_is_one_screen(tmp_path: Path) -> None:
    story = story_of(tmp_path, "large")

    assert len(job_text(story, Page(width=80)).splitlines()) <= LINES_OF_A_SCREEN
    shown = job_text(story, Page(width=80), verbose=True)
    assert all(node.reason in " ".join(shown.split()) for node in story.nodes)


@pytest.mark.parametrize("name", SMALL)
def test_what_programs_get_keeps_to_the_schema(tmp_path: Path, name: str) -> None:
    import jsonschema

    story = story_of(tmp_path, name)
    rules = jsonschema.Draft202012Validator(export.schema())
    documents = (
        export.job_document(story),
        export.check_document(story.runs[0]),
        export.ListDocument(jobs=[in_short(story)]),
    )
    for document in documents:
        made = json.loads(export.as_json(document))
        rules.validate(made)


def keys(value: object) -> Iterator[str]:
    """Yield every key that occurs anywhere in an object."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def test_every_key_of_the_object_is_described(tmp_path: Path) -> None:
    page = golden.REPOSITORY / "docs" / "reference" / "report.md"
    described = set(re.findall(r"`(\w+)`", page.read_text(encoding="utf-8")))
    found: set[str] = set()
    for name in ("requeued", "hangs", "failed"):
        made = json.loads(export.as_json(export.job_document(story_of(tmp_path / name, name))))
        for run in made["runs"]:  # the journal's own records are described there
            run["started"] = None
            run["script"] = run["script"] and {**run["script"], "seen": None}
        found |= set(keys(made))

    figures = {key for key in found if key.endswith(("gb_per_s", "gflop_per_s"))}
    assert found - figures - described == {"kind"}


def test_every_level_is_described() -> None:
    page = golden.GUIDE.read_text(encoding="utf-8")

    assert [level.value for level in Level if f"| `{level.value}` |" not in page] == []


# --- layout ---------------------------------------------------------------------------------------


WIDTHS = st.integers(min_value=1, max_value=120)
WORDS = st.text(alphabet=st.characters(codec="utf-8"), max_size=80)
NODES = "gpu[01,03,05,07,09,11,13,15,17,19,21]"


@given(WORDS, WIDTHS)
def test_wrapping_loses_nothing_but_blanks(text: str, width: int) -> None:
    lines = Page(width=width).paragraph(text)

    assert "".join(lines).replace(" ", "") == one_line(text).replace(" ", "")
    assert all(line == line.rstrip() for line in lines)
    assert all(len(line) <= width or " " not in line.strip() for line in lines)


@pytest.mark.parametrize("width", [20, 24, 30])
def test_a_list_of_nodes_longer_than_a_line_is_broken_at_its_commas(width: int) -> None:
    lines = Page(width=width).paragraph(f"drained {NODES}")

    assert all(len(line) <= width for line in lines)
    assert all(line.endswith((",", "drained")) for line in lines[:-1])
    assert "".join(line.strip() for line in lines).replace("drained", "").strip() == NODES


@given(st.lists(st.tuples(WORDS, WORDS, WORDS), max_size=5), st.none() | WIDTHS)
def test_a_table_shows_every_word_and_no_trailing_blank(
    rows: list[tuple[str, ...]], width: int | None
) -> None:
    lines = Page(width=width).table([("NODES", "ALLGATHER GB/s", "REASON"), *rows])

    assert all(line == line.rstrip() for line in lines)
    shown = set(" ".join(lines).replace(",", ", ").split())
    words = {word for row in rows for cell in row for word in one_line(cell).split(" ")}
    assert {part for word in words for part in word.replace(",", ", ").split()} <= shown


@pytest.mark.parametrize("width", [None, 60, 80])
def test_colours_change_no_character(tmp_path: Path, width: int | None) -> None:
    write_requeued_job(tmp_path)
    story = load(tmp_path, "12")
    text = job_text(story, Page(width=width))

    seen = job_text(story, Page(width=width, colour=True))

    assert "\x1b[1;31mn3 faulty" in seen
    assert "\x1b[1mNODES" in seen
    assert re.sub(r"\x1b\[[0-9;]*m", "", seen) == text
