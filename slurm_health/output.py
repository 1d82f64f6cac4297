# SPDX-License-Identifier: Apache-2.0
"""Results on standard output: for a terminal, a file, or a reader that has had enough."""

from __future__ import annotations

import os
import shutil
import sys


def terminal() -> tuple[int | None, bool]:
    """Return the width to fit, None where standard output is no terminal, and whether it is UTF."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return width, "utf" in (sys.stdout.encoding or "").lower()


def print_result(text: str) -> None:
    """Print to standard output. A reader that has gone changes nothing, least of all the code."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python must not fail once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
