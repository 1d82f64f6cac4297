# SPDX-License-Identifier: Apache-2.0
"""The table of `python -m benchmarks.check`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from benchmarks.check_cases import Case, duration
from benchmarks.check_measure import Sample

_HEADERS = ["case", "target", "median (min … max)", "of a bare srun", "verdict right"]
_DLROVER = "DLRover"
_NOTHING = "–"  # noqa: RUF001
_REASON_LENGTH = 160


@dataclass(kw_only=True)
class Row:
    """What the runs of one case came to: figures, and reasons of runs that gave none."""

    case: Case
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    dlrover_samples: list[Sample] = field(default_factory=list)
    dlrover_failures: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """What was wrong with verdicts of ours."""
        return [sample.wrong for sample in self.samples if sample.wrong]


def figures(samples: Sequence[Sample]) -> str:
    """Return the times of some runs in one cell."""
    times = [sample.elapsed_s for sample in samples]
    middle = duration(statistics.median(times))
    if len(times) == 1:
        return middle
    return f"{middle} ({duration(min(times))} … {duration(max(times))})"


def of_bare(samples: Sequence[Sample]) -> str:
    """Return how many times as long the runs took as a bare srun just before each."""
    times = [sample.elapsed_s / sample.bare_s for sample in samples if sample.bare_s]
    return f"{statistics.median(times):.1f} x" if times else _NOTHING


def rights(samples: Sequence[Sample]) -> str:
    """Return how many verdicts were right."""
    return f"{sum(not sample.wrong for sample in samples)} of {len(samples)}"


def table(rows: Sequence[Row], *, with_dlrover: bool) -> str:
    """Return the table, and below it every run that was wrong or gave no figure."""
    lines = [_line(row, with_dlrover=with_dlrover) for row in rows]
    headers = [*_HEADERS, *([_DLROVER] if with_dlrover else [])]
    text = tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)
    notes = [note for row in rows for note in _notes(row)]
    return "\n".join([text, *([""] if notes else []), *notes])


def kept(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as they are kept: every run's time, and how many verdicts were right."""
    return [
        {
            "case": row.case.name,
            "title": row.case.title,
            "times_s": [round(sample.elapsed_s, 2) for sample in row.samples],
            "right": sum(not sample.wrong for sample in row.samples),
            "dlrover_times_s": [round(sample.elapsed_s, 2) for sample in row.dlrover_samples],
        }
        for row in rows
        if row.samples
    ]


def _line(row: Row, *, with_dlrover: bool) -> list[str]:
    cells = [row.case.title, row.case.target]
    if row.samples:
        cells += [figures(row.samples), of_bare(row.samples), rights(row.samples)]
    else:
        cells += ["not measured", _NOTHING, _NOTHING]
    return [*cells, _dlrover_cell(row)] if with_dlrover else cells


def _dlrover_cell(row: Row) -> str:
    if row.dlrover_samples:
        return f"{figures(row.dlrover_samples)}, {rights(row.dlrover_samples)} right"
    return "not measured" if row.dlrover_failures else _NOTHING


def _notes(row: Row) -> list[str]:
    notes = [f"wrong: {text}" for text in row.wrong]
    notes += [f"not measured: {text}" for text in row.failures]
    notes += [f"{_DLROVER} wrong: {sample.wrong}" for sample in row.dlrover_samples if sample.wrong]
    notes += [f"{_DLROVER} not measured: {text}" for text in row.dlrover_failures]
    return [f"{row.case.name}: {_shortened(note)}" for note in notes]


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _REASON_LENGTH else line[: _REASON_LENGTH - 1] + "…"
