# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_health.report.layout import flowed, printable, table, wrapped

WIDTHS = st.integers(min_value=1, max_value=120)
WORDS = st.text(alphabet=st.characters(codec="utf-8"), max_size=80)


@given(WORDS, WIDTHS)
def test_wrapping_loses_nothing_but_blanks(text: str, width: int) -> None:
    lines = wrapped(printable(text), width)

    assert "".join(lines).replace(" ", "") == printable(text).replace(" ", "")
    assert all(line == line.strip() for line in lines)
    assert all(len(line) <= width or " " not in line for line in lines)


@given(WORDS)
def test_plain_text_is_one_line_of_ascii(text: str) -> None:
    plain = printable(text, unicode=False)

    assert plain.isascii()
    assert plain.isprintable()


@given(st.lists(st.tuples(st.just("  "), WORDS.map(printable)), max_size=5), WIDTHS)
def test_flowing_keeps_every_part_in_order(parts: list[tuple[str, str]], width: int) -> None:
    lines = flowed(parts, width)

    expected = "".join(part for _, part in parts).replace(" ", "")
    assert "".join(lines).replace(" ", "") == expected


@given(
    st.lists(
        st.tuples(WORDS, WORDS, WORDS).map(lambda row: tuple(map(printable, row))), max_size=5
    ),
    st.none() | WIDTHS,
)
def test_a_table_shows_every_word_and_no_trailing_blank(
    rows: list[tuple[str, ...]], width: int | None
) -> None:
    heads = [("NODES", ""), ("ALLGATHER", "GB/s")]

    lines = table(heads, [row[:2] for row in rows], [row[2] for row in rows], "REASON", width)

    assert all(line == line.rstrip() for line in lines)
    shown = set(" ".join(lines).replace(",", ", ").split())
    assert all(set(cell.replace(",", ", ").split()) <= shown for row in rows for cell in row)
