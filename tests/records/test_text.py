# SPDX-License-Identifier: Apache-2.0
"""Whatever others write, one line of harmless text is what becomes of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.records.text import (
    LineBuffer,
    counted,
    cut,
    elapsed_text,
    listed,
    one_line,
    plain,
)

ANY = st.text(max_size=100)


@given(ANY)
def test_any_text_becomes_one_line_that_does_nothing_to_a_terminal(text: str) -> None:
    assert one_line(text).isprintable()
    assert one_line(one_line(text)) == one_line(text)


@given(ANY)
def test_what_slurm_gets_is_ascii_without_double_quotes(text: str) -> None:
    assert plain(text).isascii()
    assert plain(text).isprintable()
    assert '"' not in plain(text)


@given(ANY, st.integers(4, 120))
def test_a_text_that_is_cut_says_so(text: str, length: int) -> None:
    shown = cut(text, length)
    assert len(shown) <= length
    assert shown == text or shown.endswith("...")


@given(st.binary(max_size=60).map(lambda data: data.replace(b"a", b"\n")), st.data())
def test_lines_that_arrive_in_pieces_are_whole(data: bytes, draw: st.DataObject) -> None:
    buffer = LineBuffer()
    cut_at = draw.draw(st.integers(0, len(data)))

    lines = buffer.feed(data[:cut_at]) + buffer.feed(data[cut_at:])

    assert lines == data.split(b"\n")[:-1]


def test_of_a_line_that_does_not_end_only_so_much_is_kept() -> None:
    buffer = LineBuffer(most_bytes=3)
    buffer.feed(b"abcdef")

    assert buffer.feed(b"g\n") == [b"defg"]


NINE = {f"n{number}": 1.0 + number for number in range(1, 10)}


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (one_line("srun: error\n\tnode\x1bn1\u202e  is “gone”"), "srun: error node n1 is “gone”"),
        (plain('é "x"'), "? 'x'"),
        (counted(0, "node"), "0 nodes"),
        (counted(1, "node"), "1 node"),
        (elapsed_text({}), ""),
        (elapsed_text({"n1": 1.62, "n2": 1.58, "n3": 20.1}), "elapsed n3 20.1 s, n[1-2] 1.6 s"),
        (elapsed_text(NINE), "elapsed n9 10.0 s, n8 9.0 s, n7 8.0 s, median of 9 nodes 6.0 s"),
        (listed(["n3", "n1", "n2"]), "n[1-3]"),
        (listed(["n[1", "n2"]), "n[1, n2"),
        (listed(["a b1", "c1"]), "a b1, c1"),
    ],
)
def test_things_are_said_shortly(made: str, text: str) -> None:
    assert made == text
