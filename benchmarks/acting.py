# SPDX-License-Identifier: Apache-2.0
"""How soon a job's script runs once the check has its verdict, on a real Slurm with a real fault.

    python -m benchmarks.acting                                every case, three runs each
    python -m benchmarks.acting --only requeue --played --runs 50

Exits 0 if every job ended as it should, however slow; 1 if one did not, for example because it ran
on the bad node; 3 if a case could not be measured. docs/explanation/performance.md has figures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from tabulate import tabulate

from benchmarks.acting_measure import CASES, Case, Measured, measure
from benchmarks.check_cases import duration
from benchmarks.check_measure import Stage, Unmeasured
from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt
from benchmarks.results import keep, machine_facts, machine_line
from tests.lab import LabError

_NOTHING = "–"  # noqa: RUF001


@dataclass(kw_only=True)
class Row:
    """The results of one case's runs."""

    case: Case
    measured: list[Measured] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def main() -> int:
    """Measure, print the table, return the exit code."""
    options = _parser().parse_args()
    machine = machine_facts()
    print(machine_line(machine), end="\n\n", flush=True)
    rows = [Row(case=case) for case in CASES if not options.only or case.name in options.only]
    # The lab is taken down on the way out of an interrupt, and of a plain kill too.
    end_as_on_interrupt()
    interrupted = False
    try:
        with Stage() as stage:
            for _ in range(options.runs):
                for row in rows:
                    _run(row, stage, played=options.played)
    except KeyboardInterrupt:
        print("benchmarks.acting: interrupted; the lab is down", file=sys.stderr)
        interrupted = True
    print(table(rows))
    if options.keep:
        keep("acting", machine, _kept(rows, played=options.played))
    return INTERRUPTED if interrupted else exit_code(rows)


def exit_code(rows: Sequence[Row]) -> int:
    """Return 1 for a job that ended as it should not, 3 for a case without a figure, else 0."""
    if any(each.wrong for row in rows for each in row.measured):
        return 1
    return 3 if any(not row.measured for row in rows) else 0


def table(rows: Sequence[Row]) -> str:
    """Return the figures, and below them every run that was wrong or not measured."""
    headers = ["verdict to the script's first line", "target", "median (min … max)"]
    headers += ["without the check", "right"]
    text = tabulate(map(_line, rows), headers=headers, tablefmt="github", disable_numparse=True)
    notes = [
        f"{row.case.name}: {note}"
        for row in rows
        for note in [
            *(f"wrong: {each.wrong}" for each in row.measured if each.wrong),
            *(f"not measured: {failure}" for failure in row.failures),
        ]
    ]
    return "\n".join([text, *([""] if notes else []), *notes])


def _kept(rows: Sequence[Row], *, played: bool) -> list[dict[str, object]]:
    return [
        {
            "case": row.case.name + ("" if played else ", real probes"),
            "title": row.case.title,
            "times_s": [round(one.elapsed_s, 3) for one in row.measured],
            "acting_s": [round(one.acting_s, 3) for one in row.measured],
            "right": sum(not one.wrong for one in row.measured),
        }
        for row in rows
        if row.measured
    ]


def _line(row: Row) -> list[str]:
    cells = [row.case.title, row.case.target]
    if not row.measured:
        return [*cells, "not measured", _NOTHING, _NOTHING]
    right = sum(not each.wrong for each in row.measured)
    return [
        *cells,
        _spread([each.elapsed_s for each in row.measured]),
        _spread([each.acting_s for each in row.measured]),
        f"{right} of {len(row.measured)}",
    ]


def _spread(times_s: Sequence[float]) -> str:
    middle = duration(statistics.median(times_s))
    if len(times_s) == 1:
        return middle
    return f"{middle} ({duration(min(times_s))} … {duration(max(times_s))})"


def _run(row: Row, stage: Stage, *, played: bool) -> None:
    load = os.getloadavg()[0]
    try:
        measured = measure(stage, row.case, played=played, load_average=round(load, 1))
    except (Unmeasured, LabError) as err:
        row.failures.append(str(err))
        print(f"{row.case.name}: not measured: {err}", file=sys.stderr, flush=True)
        return
    row.measured.append(measured)
    wrong = f", WRONG: {measured.wrong}" if measured.wrong else ""
    print(
        f"{row.case.name}: {duration(measured.elapsed_s)}, without the check"
        f" {duration(measured.acting_s)}, load average {load:.1f} before{wrong}",
        file=sys.stderr,
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {case.name:13} {case.title}" for case in CASES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.acting",
        description="How soon a job's script runs once the check has its verdict, on the lab.",
        epilog=f"cases:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=count, default=3, metavar="K", help="of each case [3]")
    parser.add_argument(
        "--only",
        action="append",
        choices=[case.name for case in CASES],
        metavar="CASE",
        help="this case; repeatable",
    )
    parser.add_argument("--keep", action="store_true", help="in benchmarks/results/acting.json")
    parser.add_argument(
        "--played",
        action="store_true",
        help="no torch: probes that are told what to find, so that only acting takes time",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
