# SPDX-License-Identifier: Apache-2.0
"""Where the results of a command go: to a terminal, a reader that ends early, or a file, whole."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self, TextIO

from slurm_health.records.errors import NotWritten
from slurm_health.report.layout import Page


def page_here() -> Page:
    """Return how standard output shows text: no width and no colour if it is no terminal.

    LC_ALL=C says that it is not Unicode, whatever Python makes of that. NO_COLOR as no-color.org
    has it: set, to anything but the empty text, it declines colours.
    """
    shown, kind = sys.stdout.isatty(), os.environ.get("TERM", "")
    plain = os.environ.get("LC_ALL") in {"C", "POSIX"}
    return Page(
        width=shutil.get_terminal_size().columns if shown else None,
        unicode="utf" in (sys.stdout.encoding or "").lower() and not plain,
        colour=shown and kind not in {"", "dumb"} and not os.environ.get("NO_COLOR"),
    )


def print_result(text: str) -> None:
    """Print to standard output. A reader that has gone changes nothing, least of all the code.

    Raises:
        NotWritten: it is a file that cannot be written to.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as err:
        # Python must not fail once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(err, BrokenPipeError):
            raise NotWritten(Path("standard output"), err) from err


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to standard output, as `print_result` does."""
    print_result("".join(f"{line}\n" for line in lines))


def print_answer(value: object, text: str, *, as_json: bool) -> None:
    """Print a value as JSON to read, or the text that says the same.

    Raises:
        NotWritten: standard output is a file that cannot be written to.
    """
    import msgspec

    if as_json:
        text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
    print_result(text)


_REDRAW_S = 0.2
_ERASE = "\r\x1b[K"


class ProgressLine(logging.Filter):
    """A line of progress, redrawn in place while it is entered; nothing if there is no terminal.

    As a filter of the log's handlers it is erased before anything is logged.
    """

    def __init__(
        self, terminal: TextIO | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._terminal = terminal or sys.stderr
        self._monotonic = monotonic
        self._drawn_s = -_REDRAW_S
        self._shown = False

    def __enter__(self) -> Self:
        for handler in logging.getLogger().handlers:
            handler.addFilter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.erase()
        for handler in logging.getLogger().handlers:
            handler.removeFilter(self)

    def show(self, text: str) -> None:
        """Draw the line anew, unless that has just been done."""
        now_s = self._monotonic()
        if now_s - self._drawn_s < _REDRAW_S or not self._terminal.isatty():
            return
        self._drawn_s, self._shown = now_s, True
        self._terminal.write(_ERASE + text[: shutil.get_terminal_size().columns - 1])
        self._terminal.flush()

    def erase(self) -> None:
        """Leave nothing of the line on the terminal."""
        if self._shown:
            self._terminal.write(_ERASE)
            self._terminal.flush()
            self._shown = False

    def filter(self, _: logging.LogRecord) -> bool:
        """Make room for what is logged now."""
        self.erase()
        return True


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file that all users may read.

    Raises:
        NotWritten: it cannot be written.
    """
    from slurm_health.system.private_files import publish

    try:
        publish(path, data)
    except OSError as err:
        raise NotWritten(path, err) from err
