# SPDX-License-Identifier: Apache-2.0
"""Foreign text, made safe for one line of a terminal, of a log or of a field of Slurm's.

And ranks, nodes and signals in a few words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from signal import Signals

from slurm_health.records.nodeset import fold

# Every comment that slurm-health sets on a job begins with it.
REASON_PREFIX = "slurm-health:"
# Slurm's own tools cut longer reasons.
REASON_LENGTH = 200
_NODE = re.compile(r"[\w.-]+", re.ASCII)
_MOST_DIGITS = 18  # of what fits into 64 bits; Python refuses some thousands
NOTHING = "\N{EN DASH}"  # stands for a figure or a verdict that is not there
SIGKILL, SIGTERM = 9, 15
# Times that differ by a tenth of a second; of more, the slowest few and what was usual.
_MOST_TIMES = 8
_SLOWEST = 3


class LineBuffer:
    """Assembles the lines of a stream that arrives in pieces."""

    def __init__(self, most_bytes: int = 1 << 24) -> None:
        self._most_bytes = most_bytes  # kept of a line that does not end
        self._begun = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes that have arrived; return the lines that are whole by now."""
        *lines, begun = (self._begun + data).split(b"\n")
        self._begun = begun[-self._most_bytes :]
        return lines


def one_line(text: str) -> str:
    """Return text in one line, without characters that act on a terminal."""
    if not text.isprintable():
        text = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(text.split())


def whole_number(text: str) -> int | None:
    """Return the whole number in a text; None if it is none, or longer than 64 bits."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def plain(text: str) -> str:
    """Return text as Slurm's fields can hold it: one line of ASCII, no double quotes."""
    return one_line(text).encode("ascii", "replace").decode().replace('"', "'")


def cut(text: str, length: int) -> str:
    """Return at most `length` characters of text, the last three dots if it is cut."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def counted(count: int, thing: str) -> str:
    """Return `1 node`, or `3 nodes`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def signal_text(number: int) -> str:
    """Return `SIGSEGV`, or `signal 40` for one without a name."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def listed(nodes: Sequence[str]) -> str:
    """Return nodes as a short list; names that no node list can hold, unchanged."""
    return fold(nodes) if all(map(_NODE.fullmatch, nodes)) else ", ".join(nodes)


def elapsed_text(elapsed_s: Mapping[str, float]) -> str:
    """Return `elapsed n3 20.1 s, n[1-2,4] 1.6 s`: how long a round took on nodes, slowest first.

    Nodes with the same time, to a tenth of a second, share a figure. Empty without nodes.
    """
    nodes_of: dict[float, list[str]] = {}
    for node, seconds in elapsed_s.items():
        nodes_of.setdefault(round(seconds, 1), []).append(node)
    slowest = sorted(nodes_of, reverse=True)
    many = len(slowest) > _MOST_TIMES
    parts = [
        f"{listed(nodes_of[seconds])} {seconds:.1f} s"
        for seconds in slowest[: _SLOWEST if many else None]
    ]
    if many:
        median_s = sorted(elapsed_s.values())[len(elapsed_s) // 2]
        parts.append(f"median of {len(elapsed_s)} nodes {median_s:.1f} s")
    return f"elapsed {', '.join(parts)}" if parts else ""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0-7`, `ranks 1,4`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    text = ",".join("-".join(map(str, run)) for run in runs)
    return f"rank {text}" if len(set(ranks)) == 1 else f"ranks {text}"


def duration_text(duration_s: float) -> str:
    """Return a time span in two units at most: 6.1 s, 41 s, 3 min 5 s, 2 h 10 min."""
    if not isfinite(duration_s) or duration_s < 0:
        return "an unknown time"
    if duration_s < 9.95:
        return f"{duration_s:.1f} s"
    seconds = round(duration_s)
    if seconds < 120:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h" if hours % 24 else f"{hours // 24} d"
