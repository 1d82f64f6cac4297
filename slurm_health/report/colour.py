# SPDX-License-Identifier: Apache-2.0
"""Colour for a report on a terminal: heads stand out, and so does what is not well."""

from __future__ import annotations

import re

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


def coloured(text: str) -> str:
    """Return a report's text with colours; its characters and their places stay as they are."""
    return "\n".join(map(_line, text.split("\n")))


def _line(line: str) -> str:
    if _HEAD.match(line):
        return f"{_BOLD}{line}{_RESET}"
    return _VERDICT.sub(
        lambda found: f"{_OF_LEVEL[found[found.lastindex or 0]]}{found[0]}{_RESET}", line
    )
