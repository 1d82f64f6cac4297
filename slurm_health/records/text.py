# SPDX-License-Identifier: Apache-2.0
"""What others wrote, made fit for one line of a terminal, of a log or of a field of Slurm's."""

from __future__ import annotations

# Every comment that slurm-health sets on a job begins so, and is known again by it.
REASON_PREFIX = "slurm-health:"
# Slurm's own tools cut longer reasons.
REASON_LENGTH = 200
_MOST_DIGITS = 18  # of what fits into 64 bits; Python refuses some thousands


def one_line(text: str) -> str:
    """Return text in one line, without characters that act on a terminal."""
    if not text.isprintable():
        text = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(text.split())


def whole_number(text: str) -> int | None:
    """Return the whole number that a text spells; None if it is none, or beyond all counting."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def plain(text: str) -> str:
    """Return text as Slurm's fields can hold it: one line of ASCII, no double quotes."""
    return one_line(text).encode("ascii", "replace").decode().replace('"', "'")


def cut(text: str, length: int) -> str:
    """Return at most `length` characters of text, with dots where some are left out."""
    return text if len(text) <= length else f"{text[: length - 3]}..."
