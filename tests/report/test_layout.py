# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.records.text import one_line
from slurm_health.report.layout import Page
from slurm_health.report.read import load
from slurm_health.report.text import job_text
from tests.support.journals import write_requeued_job

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
