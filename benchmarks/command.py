# SPDX-License-Identifier: Apache-2.0
"""What the benchmark commands share: how they read a count, and how they end."""

from __future__ import annotations

import argparse
import signal
from types import FrameType

INTERRUPTED = 130  # what a shell reports of a command that Ctrl-C ended


def count(text: str) -> int:
    """Return a number of runs.

    Raises:
        ArgumentTypeError: it is not a number of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def end_as_on_interrupt() -> None:
    """Have SIGTERM end this process as Ctrl-C does, so that its clusters end with it."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
