# SPDX-License-Identifier: Apache-2.0
"""What the benchmark commands share: how they read a count, keep what was run, and how they end."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

INTERRUPTED = 130  # what a shell reports of a command that Ctrl-C ended


def count(text: str) -> int:
    """Return a number of runs.

    Raises:
        ArgumentTypeError: it is not a number of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def kept(results: Path | None) -> list[dict[str, Any]]:
    """Return the runs that were kept in a file, none where there is no file yet."""
    if results is None or not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def keep(results: Path | None, run: Mapping[str, Any]) -> None:
    """Keep a run as one line of a file, where there is to be one."""
    if results is not None:
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("a") as file:
            file.write(json.dumps(run, ensure_ascii=False) + "\n")


def end_as_on_interrupt() -> None:
    """Have SIGTERM end this process as Ctrl-C does, so that its clusters end with it."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
