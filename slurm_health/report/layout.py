# SPDX-License-Identifier: Apache-2.0
"""Text and numbers, fitted to where they are shown, and coloured where that has colours.

`tabulate` and `textwrap` do the work.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from slurm_health.records.text import NOTHING, one_line
from slurm_health.records.verdict import Severity

_GAP = 2  # columns between cells, as tabulate's "plain" has them
_INDENT = "    "
_FEWEST_CHARACTERS = 24  # prose in a narrower column is not worth reading
_FIRST_COLUMN = 12
_KEPT_BLANK = "\N{NO-BREAK SPACE}"
_KEPT_WITH_UNIT = "\N{NARROW NO-BREAK SPACE}"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|min|h|d|%|GB/s|times)\b|%)")
_ASCII = str.maketrans({"–": "-", "—": "-", "…": "...", "×": "x", "≥": ">=", "≤": "<="})  # noqa: RUF001
_RESET = "\x1b[0m"
_BOLD = "\x1b[1m"
_COLOURS = {
    Severity.ERROR: "\x1b[1;31m",
    Severity.WARNING: "\x1b[33m",
    Severity.UNDECIDED: "\x1b[35m",
    Severity.OK: "\x1b[32m",
    Severity.INFO: _BOLD,
}


class Tinted(NamedTuple):
    """A cell of a table of which the first `head` characters have the colour of a severity."""

    text: str
    severity: Severity
    head: int


def moment_text(time_s: float | None) -> str:
    """Return a time as the clock on the wall here shows it."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s)) if time_s else NOTHING
    except (OSError, OverflowError, ValueError):  # beyond all calendars
        return NOTHING


def number_text(value: float) -> str:
    """Return a figure with two significant digits, whole from 10 upwards."""
    exponent = int(f"{value:.1e}".partition("e")[2])
    if not -4 < exponent < 7:
        return f"{value:.1e}"
    return f"{value:.{max(0, 1 - exponent)}f}"


def range_text(values: Collection[float]) -> str:
    """Return `low … high`, one number where both read the same, a dash where there is none."""
    if not values:
        return NOTHING
    low, high = number_text(min(values)), number_text(max(values))
    return low if low == high else f"{low} … {high}"


@dataclass(frozen=True, kw_only=True)
class Page:
    """Where a text is shown: columns to fit (None: break no line), if beyond ASCII, if in colours.

    Journals hold the words of programs, so all text is made harmless first. A word that cannot be
    broken stands out on the right; no text is left out, and no line ends in blanks.
    """

    width: int | None = None
    unicode: bool = True
    colour: bool = False

    def paragraph(self, text: str) -> list[str]:
        """Return the lines of a text; all but the first are indented."""
        return _wrapped(self._shown(text), self.width, _INDENT)

    def phrases(self, phrases: Sequence[str]) -> list[str]:
        """Return phrases side by side; where they do not fit, lines begin between two of them."""
        room = None if self.width is None else self.width - len(_INDENT)
        kept = [
            " ".join(line.replace(" ", _KEPT_BLANK) for line in _wrapped(phrase, room))
            for phrase in map(self._shown, phrases)
            if phrase
        ]
        lines = _wrapped("   ".join(kept), self.width, _INDENT)
        return [line.replace(_KEPT_BLANK, " ") for line in lines]

    def table(self, rows: Sequence[Sequence[str | Tinted]], align: Sequence[str] = ()) -> list[str]:
        """Return the lines of a table: first the heads, in the last column prose.

        If the prose has too little room, every word of a head takes a line of its own; if that
        does not help, the prose stands below its row.
        """
        shown = [[self._shown(c.text if isinstance(c, Tinted) else c) for c in row] for row in rows]
        first = None if self.width is None else max(_FIRST_COLUMN, self.width // 3)
        prose = [row.pop() for row in shown]
        cells = [["\n".join(_wrapped(row[0], first)), *row[1:]] for row in shown]
        tall_head = [head.replace(" ", "\n") for head in cells[0]]
        needed = min(_FEWEST_CHARACTERS, max(map(len, prose[1:]), default=0))
        for head in (cells[0], tall_head):
            taken = max(map(len, _columns([head, *cells[1:]], align)))
            left = None if self.width is None else self.width - taken - _GAP
            if left is None or left >= needed:
                column = ["\n".join(_wrapped(text, left)) for text in prose if needed]
                wrapped = [[*row, *column[n : n + 1]] for n, row in enumerate([head, *cells[1:]])]
                return _columns(self._tinted(wrapped, rows), align)
        cells[0] = tall_head
        lines = iter(_columns(self._tinted(cells, rows), align))
        room = None if self.width is None else self.width - len(_INDENT)
        below: list[str] = []
        for row, text in zip(cells, ["", *prose[1:]], strict=True):
            below += islice(lines, 1 + max(cell.count("\n") for cell in row))
            below += [_INDENT + line for line in _wrapped(text, room) if text]
        return below

    def titled(self, rows: Sequence[Sequence[str | Tinted]]) -> list[str]:
        """Return the lines of a table without heads: a word in front, prose behind it."""
        lines = self.table([["", ""], *rows])
        return lines if lines[0] else lines[1:]

    def _tinted(
        self, wrapped: Sequence[Sequence[str]], rows: Sequence[Sequence[str | Tinted]]
    ) -> list[list[str]]:
        """Return the cells of a table with their colours, the heads in bold."""
        if not self.colour:
            return [list(row) for row in wrapped]
        tinted = [[_tint(text, Severity.INFO, len(text)) for text in wrapped[0]]]
        for row, cells in zip(wrapped[1:], rows[1:], strict=True):
            tinted.append(
                [
                    _tint(text, cell.severity, cell.head) if isinstance(cell, Tinted) else text
                    for text, cell in zip(row, cells, strict=False)
                ]
            )
        return tinted

    def _shown(self, text: str) -> str:
        line = one_line(text)
        if self.unicode:
            return line
        return line.translate(_ASCII).encode("ascii", "replace").decode()


def _tint(text: str, severity: Severity, head: int) -> str:
    """Return text whose beginning has a colour, as far as it is on the first line."""
    first, line_end, rest = text.partition("\n")
    coloured, plain = first[:head], first[head:]
    if not coloured:
        return text
    return f"{_COLOURS[severity]}{coloured}{_RESET}{plain}{line_end}{rest}"


def _columns(cells: Sequence[Sequence[str]], align: Sequence[str]) -> list[str]:
    from tabulate import tabulate  # reads its own metadata when it is imported

    # Heads are a row like others: tabulate would widen the columns for them.
    text = tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=align)
    return text.split("\n")


class _AtCommas(textwrap.TextWrapper):
    """Breaks at commas too, as a list of nodes can be broken."""

    wordsep_simple_re = re.compile(r"([\t\n\x0b\x0c\r ]+|(?<=,)(?=\S))")


def _wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    """Return text in lines of `width`, broken at blanks and, where a word is longer, at commas.

    A number and its unit stay together.
    """
    if width is None or len(text) <= width:
        return [text]
    text = _BEFORE_UNIT.sub(_KEPT_WITH_UNIT, text)
    longest = max(map(len, text.split(" ")))
    wrapper = _AtCommas if longest > width - len(indent) else textwrap.TextWrapper
    lines = wrapper(
        width=max(1, width),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ).wrap(text)
    return [line.replace(_KEPT_WITH_UNIT, " ") for line in lines]
