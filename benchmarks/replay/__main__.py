# SPDX-License-Identifier: Apache-2.0
"""What does slurm-health say of recordings of real clusters?

    python -m benchmarks.replay DIR               whatever of them lies below DIR
    python -m benchmarks.replay DIR --missed      and each case that was not named rightly

Exits 0 where no innocent was accused, 1 where one was, 2 where DIR has none of them.
docs/explanation/evidence.md names the repositories; threads.py has the issues.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tabulate import tabulate

from benchmarks.replay import (
    chronicles,
    diagnostics,
    dumps,
    harmless,
    kernel,
    logs,
    matches,
    monitors,
    paces,
    threads,
)
from benchmarks.replay.source import CannotRead
from benchmarks.results import keep, machine_facts, machine_line

SOURCES = (
    *dumps.SOURCES,
    *logs.SOURCES,
    *kernel.SOURCES,
    *paces.SOURCES,
    *monitors.SOURCES,
    *matches.SOURCES,
    *diagnostics.SOURCES,
    *threads.SOURCES,
    *harmless.SOURCES,
    *chronicles.SOURCES,
)
_HEAD = (
    "source",
    "cases",
    "right",
    "undecided",
    "wrong",
    "innocent",
    "contested",
    "s",
    "anchor",
    "seen",
)


def main(argv: list[str] | None = None) -> int:
    """Score what is there, print the table, and return the exit code."""
    first, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recordings", type=Path, metavar="DIR")
    parser.add_argument("--keep", action="store_true", help="in benchmarks/results/evidence.json")
    parser.add_argument("--missed", action="store_true", help="list what was not named rightly")
    args = parser.parse_args(argv)
    rows, missed, innocent = [], [], 0
    for source in SOURCES:
        place = source.find(args.recordings)
        if place is None:
            print(f"{source.name}: no {source.place} below {args.recordings}", file=sys.stderr)
            continue
        began_s = time.perf_counter()
        try:
            score = source.score(place)
        except CannotRead as err:
            print(f"{source.name}: not read: {err}", file=sys.stderr)
            continue
        took_s = time.perf_counter() - began_s
        innocent += score.innocent
        missed += [f"{source.name}: {each}" for each in score.missed]
        rows.append(
            (
                source.name,
                score.cases,
                score.right,
                score.undecided,
                score.wrong,
                score.innocent,
                score.contested,
                f"{took_s:.2f}",
                source.anchor,
                "yes" if source.seen else "no",
            )
        )
    if not rows:
        return 2
    print(tabulate(rows, headers=_HEAD, tablefmt="pipe"))
    machine = machine_facts()
    print(f"\n{machine_line(machine)}")
    if args.keep:
        counts = [dict(zip(("case", *_HEAD[1:7]), row, strict=False)) for row in rows]
        keep("evidence", machine, counts)
    if args.missed:
        print("", *missed, sep="\n")
    return 1 if innocent else 0


if __name__ == "__main__":
    sys.exit(main())
