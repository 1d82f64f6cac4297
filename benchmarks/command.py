# SPDX-License-Identifier: Apache-2.0
"""What the commands of this directory share: how they read a count, and how they end."""

from __future__ import annotations

import argparse
import signal
from types import FrameType


def count(text: str) -> int:
    """Return a number of runs.

    Raises:
        ArgumentTypeError: it is not 1 or more.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def end_as_on_interrupt() -> None:
    """Have SIGTERM end this process as Ctrl-C does, so that its clusters end with it."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
