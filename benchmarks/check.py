# SPDX-License-Identifier: Apache-2.0
"""How long a check takes and whether it is right, on a real Slurm with real faults.

    python -m benchmarks.check                                the whole table
    python -m benchmarks.check --only healthy-4 --runs 10
    python -m benchmarks.check --dlrover VENV                 compared with DLRover's check

Exits 0 if every verdict was right, however slow; 1 if one was wrong; 3 if a case could not be
measured. docs/explanation/performance.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from compileall import compile_dir
from dataclasses import replace
from pathlib import Path

import slurm_health
from benchmarks import dlrover
from benchmarks.check_cases import Case, cases, duration
from benchmarks.check_measure import Sample, Stage, Unmeasured
from benchmarks.check_table import Row, kept, table
from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt
from benchmarks.results import keep, machine_facts, machine_line
from tests.lab import LabError

_PACKAGE = Path(slurm_health.__file__).parent


def main() -> int:
    """Measure, print the table, return the exit code."""
    options = _parser().parse_args()
    if options.dlrover is not None:
        reason = dlrover.unusable(options.dlrover)
        if reason is not None:
            print(f"benchmarks.check: {reason}", file=sys.stderr)
            return 2
    chosen = [case for case in cases() if not options.only or case.name in options.only]
    machine = machine_facts()
    print(machine_line(machine), end="\n\n", flush=True)
    compile_dir(_PACKAGE, quiet=1)  # as an installation is; without, each agent would do it
    # The lab is taken down on the way out of an interrupt, and of a plain kill too.
    end_as_on_interrupt()
    try:
        rows = _measured(chosen, options)
    except KeyboardInterrupt:
        print("benchmarks.check: interrupted; the lab is down", file=sys.stderr)
        return INTERRUPTED
    print(table(rows, with_dlrover=options.dlrover is not None))
    if options.keep:
        keep("check", machine, kept(rows))
    return exit_code(rows)


def exit_code(rows: Sequence[Row]) -> int:
    """Return 1 for a wrong verdict, 3 for a case without any figure of ours, else 0."""
    if any(row.wrong for row in rows):
        return 1
    return 3 if any(not row.samples for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    names = [case.name for case in cases()]
    listed = "\n".join(f"  {case.name:13} {case.title}" for case in cases())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check",
        description="How long a check takes and whether it is right, on the lab.",
        epilog=f"cases:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=count, default=3, metavar="K", help="of each case [3]")
    parser.add_argument(
        "--only", action="append", choices=names, metavar="CASE", help="this case; repeatable"
    )
    parser.add_argument(
        "--dlrover", type=Path, metavar="VENV", help="an environment with dlrover and torch"
    )
    parser.add_argument("--dlrover-runs", type=count, default=3, metavar="K", help="its runs [3]")
    parser.add_argument("--keep", action="store_true", help="in benchmarks/results/check.json")
    parser.add_argument(
        "--dlrover-faults",
        action="store_true",
        help="run its cases with a fault too, once each; one takes over six minutes",
    )
    return parser


def _measured(chosen: Sequence[Case], options: argparse.Namespace) -> list[Row]:
    rows = []
    with Stage() as stage:
        for case in chosen:
            row = Row(case=case)
            rows.append(row)
            for _ in range(options.runs):
                _run(row, stage)
            scene = case.dlrover
            if options.dlrover is None or scene is None:
                continue
            if scene.crashing is None or options.dlrover_faults:
                for _ in range(options.dlrover_runs if scene.crashing is None else 1):
                    _run_dlrover(row, scene, options.dlrover)
    return rows


def _run(row: Row, stage: Stage) -> None:
    load = os.getloadavg()[0]
    try:
        sample = row.case.measure(stage)
    except (Unmeasured, LabError) as err:
        row.failures.append(str(err))
        _progress(row, f"not measured: {err}")
        return
    sample = replace(sample, detail=f"{sample.detail}, load average {load:.1f} before")
    row.samples.append(sample)
    verdict = f" wrong: {sample.wrong}" if sample.wrong else ""
    _progress(row, f"{duration(sample.elapsed_s)} ({sample.detail}){verdict}")


def _run_dlrover(row: Row, scene: dlrover.Scene, venv: Path) -> None:
    try:
        outcome = dlrover.measure(venv, scene)
    except dlrover.Unmeasured as err:
        row.dlrover_failures.append(str(err))
        _progress(row, f"DLRover not measured: {err}")
        return
    wrong = "" if outcome.right else f"nodes {list(outcome.faulty)} called faulty"
    row.dlrover_samples.append(Sample(elapsed_s=outcome.elapsed_s, wrong=wrong))
    _progress(row, f"DLRover {duration(outcome.elapsed_s)} {wrong}")


def _progress(row: Row, text: str) -> None:
    print(f"{row.case.name}: {text}".rstrip(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
