# SPDX-License-Identifier: Apache-2.0
"""A report's text and numbers, fitted to where they are shown, and coloured where it has colour.

`tabulate` and `textwrap` do the work.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from slurm_health.records.text import one_line

NOTHING = "\N{EN DASH}"  # stands for a figure or a verdict that is not there

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
_OF_LEVEL = {
    "faulty": "\x1b[1;31m",
    "slow": "\x1b[33m",
    "inconclusive": "\x1b[35m",
    "healthy": "\x1b[32m",
}
_LEVELS = "|".join(_OF_LEVEL)
# A cell of a table, a count of nodes, or the level at the end of what is said of a path or leaf.
_VERDICT = re.compile(rf"(?<=  )({_LEVELS})(?=  |$)|\b(?:\d+|all) ({_LEVELS})\b|\b({_LEVELS})(?=:)")
_HEAD = re.compile(r"(?:[A-Z][A-Z-]+)(?: {2,}|$)")


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
    """Where a text is shown: columns to fit, None to break no line, and whether beyond ASCII.

    Journals hold what programs said, so all that is shown is made harmless first. What cannot be
    broken stands out on the right; nothing is left away, and no line ends in blanks.
    """

    width: int | None = None
    unicode: bool = True

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

    def table(self, rows: Sequence[Sequence[str]], align: Sequence[str] = ()) -> list[str]:
        """Return the lines of a table: first the heads, in the last column prose.

        Where the prose has too little room, each word of a head takes a line of its own; where
        that does not help, the prose stands below its row.
        """
        shown = [[self._shown(cell) for cell in row] for row in rows]
        first = None if self.width is None else max(_FIRST_COLUMN, self.width // 3)
        prose = [row.pop() for row in shown]
        cells = [["\n".join(_wrapped(row[0], first)), *row[1:]] for row in shown]
        tall_head = [head.replace(" ", "\n") for head in cells[0]]
        needed = min(_FEWEST_CHARACTERS, max(map(len, prose[1:]), default=0))
        for head in (cells[0], tall_head):
            left = self._room_beside(_columns([head, *cells[1:]], align))
            if left is None or left >= needed:
                column = ["\n".join(_wrapped(text, left)) for text in prose if needed]
                return _columns([head, *cells[1:]], align, column)
        return list(self._with_prose_below([tall_head, *cells[1:]], prose, align))

    def titled(self, rows: Sequence[tuple[str, str]]) -> list[str]:
        """Return the lines of a table without heads: a word in front, prose behind it."""
        lines = self.table([("", ""), *rows])
        return lines if lines[0] else lines[1:]

    def _shown(self, text: str) -> str:
        line = one_line(text)
        if self.unicode:
            return line
        return line.translate(_ASCII).encode("ascii", "replace").decode()

    def _room_beside(self, lines: Sequence[str]) -> int | None:
        return None if self.width is None else self.width - max(map(len, lines)) - _GAP

    def _with_prose_below(
        self, cells: Sequence[Sequence[str]], prose: Sequence[str], align: Sequence[str]
    ) -> Iterator[str]:
        lines = iter(_columns(cells, align))
        room = None if self.width is None else self.width - len(_INDENT)
        for row, text in zip(cells, ["", *prose[1:]], strict=True):
            yield from islice(lines, 1 + max(cell.count("\n") for cell in row))
            yield from (_INDENT + line for line in _wrapped(text, room) if text)


def _columns(
    cells: Sequence[Sequence[str]], align: Sequence[str], last: Sequence[str] = ()
) -> list[str]:
    from tabulate import tabulate  # reads its own metadata when it is imported

    rows = [[*row, end] for row, end in zip(cells, last, strict=True)] if last else cells
    # Heads are a row like others: tabulate would widen the columns for them.
    text = tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=align)
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


def coloured(text: str) -> str:
    """Return a report's text with colours; its characters and their places stay as they are."""
    return "\n".join(map(_line, text.split("\n")))


def _line(line: str) -> str:
    if _HEAD.match(line):
        return f"{_BOLD}{line}{_RESET}"
    return _VERDICT.sub(
        lambda found: f"{_OF_LEVEL[found[found.lastindex or 0]]}{found[0]}{_RESET}", line
    )
