# SPDX-License-Identifier: Apache-2.0
"""Text that fits a terminal: wrapping, hanging indents, columns. No trailing blanks anywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest

_GAP = "   "
_NARROW_GAP = "  "
_INDENT = "    "
_FEWEST_CHARACTERS = 24  # a last column narrower than this is not worth reading
_FIRST_COLUMN = 12
_ASCII = str.maketrans({"–": "-", "—": "-", "…": "...", "×": "x", "≥": ">=", "≤": "<="})  # noqa: RUF001


def printable(text: str, *, unicode: bool = True) -> str:
    """Return text in one line, without characters that act on a terminal.

    Journals hold what programs said. Without `unicode` the result is plain ASCII.
    """
    line = " ".join(text.split())
    line = "".join(char if char.isprintable() else "?" for char in line)
    if unicode:
        return line
    return line.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def wrapped(text: str, width: int | None) -> list[str]:
    """Return text in lines of `width`, broken at blanks and, where a word is longer, at commas.

    What cannot be broken stands out; nothing is left away.
    """
    if width is None or len(text) <= width:
        return [text]
    lines = [""]
    for word in text.split():
        pieces = [word] if len(word) <= width else re.split(r"(?<=,)", word)
        glue = " " if lines[-1] else ""
        for piece in pieces:
            if lines[-1] and len(lines[-1] + glue + piece) > width:
                lines.append(piece)
            else:
                lines[-1] += glue + piece
            glue = ""
    return lines


def flowed(parts: Sequence[tuple[str, str]], width: int | None) -> list[str]:
    """Return (gap before it, part) after part; a new line begins, indented, between two parts."""
    lines = [""]
    for gap, part in parts:
        if not part:
            continue
        joined = lines[-1] + (gap if lines[-1] else "") + part
        if width is None or len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines += [_INDENT + line for line in wrapped(part, width - len(_INDENT))]
    return lines


def table(
    heads: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    remarks: Sequence[str],
    remark_head: str,
    width: int | None,
) -> list[str]:
    """Return the lines of a table whose last column, one remark per row, takes what is left.

    Where too little is left, first the heads take two lines (name, unit), then the remarks go
    below their rows. The first column may break at its commas.
    """
    one_line = [[f"{name} {unit}".strip()] for name, unit in heads]
    two_lines = [[name, unit] if unit else [name] for name, unit in heads]
    wanted = min(_FEWEST_CHARACTERS, max(map(len, remarks), default=0))
    cells = _cells(rows, width and width // 3)
    for head in (one_line, two_lines):
        left = None if width is None else width - _total(_widths([head, *cells])) - len(_GAP)
        if left is None or left >= (wanted or -len(_GAP)):
            if not wanted:
                return _aligned([head, *cells])
            last = [[remark_head], *(wrapped(remark, left) for remark in remarks)]
            return _aligned([[*row, end] for row, end in zip([head, *cells], last, strict=True)])
    return _with_remarks_below(two_lines, _cells(rows, width and width // 4), remarks, width)


_Row = list[list[str]]  # cells, each a list of lines


def _cells(rows: Sequence[Sequence[str]], cap: int | None) -> list[_Row]:
    first = None if cap is None else max(_FIRST_COLUMN, cap)
    return [[wrapped(row[0], first), *([cell] for cell in row[1:])] for row in rows]


def _widths(rows: Sequence[_Row]) -> list[int]:
    columns = zip(*rows, strict=True)
    widths = [max(len(line) for cell in column for line in cell) for column in columns]
    return [max(_FIRST_COLUMN, widths[0]), *widths[1:]]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _aligned(rows: Sequence[_Row], gap: str = _GAP) -> list[str]:
    widths = _widths(rows)
    return [
        gap.join(text.ljust(width) for text, width in zip(texts, widths, strict=True)).rstrip()
        for row in rows
        for texts in zip_longest(*row, fillvalue="")
    ]


def _with_remarks_below(
    head: _Row, rows: Sequence[_Row], remarks: Sequence[str], width: int | None
) -> list[str]:
    lines = _aligned([head, *rows], _NARROW_GAP)
    heights = [max(map(len, row)) for row in [head, *rows]]
    below: list[str] = []
    for height, remark in zip(heights, ["", *remarks], strict=True):
        below += lines[:height]
        lines = lines[height:]
        if remark:
            room = None if width is None else width - len(_INDENT)
            below += [_INDENT + line for line in wrapped(remark, room)]
    return below
