# SPDX-License-Identifier: Apache-2.0
"""Which policy keeps training going? A year of a real cluster's faults, replayed.

    python -m benchmarks.year DIR --page=docs/explanation/year.md   the page's runs, into the page
    python -m benchmarks.year DIR --nodes=1000 --seeds=5 --policy=plain --policy=best

DIR has fault_trace.json of InfiniteHBD-Trace, at any depth. Interrupted, it goes on where it
stopped. With --page, what is between the marks of the page, its pictures and its list of runs are
written anew; docs/explanation/year.md says what is real, what is played, and what came of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from benchmarks.check_table import machine_facts, machine_line
from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt
from benchmarks.year import page, pictures, play
from benchmarks.year.checks import Checks
from benchmarks.year.policies import BY_NAME, COMPARED, Rule
from benchmarks.year.recording import Recording, read
from benchmarks.year.results import Done, Results, Run, write

TRACE = "fault_trace.json"


def main(argv: list[str] | None = None) -> int:
    """Make the runs that are not there yet, print the tables, and return the exit code."""
    args = _arguments(argv)
    found = sorted(args.recordings.rglob(TRACE)) if args.recordings.is_dir() else []
    if not found:
        print(f"benchmarks.year: no {TRACE} below {args.recordings}", file=sys.stderr)
        return 2
    try:
        recording = read(found[0].read_bytes())
        text = args.page.read_text() if args.page else ""
    except (OSError, ValueError) as err:
        print(f"benchmarks.year: {found[0]}: {err}", file=sys.stderr)
        return 2
    results = Results(args.results)
    runs = list(_asked(args) if args.nodes or args.policy else page.runs(days=args.days))
    try:
        if not args.only_tables:
            _run_all(recording, runs, results)
    except KeyboardInterrupt:
        print(f"benchmarks.year: interrupted; the runs are in {args.results}", file=sys.stderr)
        return INTERRUPTED
    done = [results.done[run] for run in runs if run in results.done]
    if not args.page:
        print(page.text(done, base=args.base), machine_line(machine_facts()), sep="\n")
        return 0
    figures = args.page.parent / "figures"
    figures.mkdir(exist_ok=True)
    write(figures / "year-runs.jsonl", done)
    (figures / "year-faults.svg").write_text(pictures.faults(recording))
    (figures / "year-ratio.svg").write_text(pictures.ratio(done))
    args.page.write_text(page.filled(text, {**page.blocks(done), **page.facts(recording)}))
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    first, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.year",
        description=first,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recordings", type=Path, metavar="DIR")
    parser.add_argument("--results", type=Path, default=Path("build/year"), help="(build/year)")
    parser.add_argument("--page", type=Path, help="the page to write into")
    parser.add_argument("--nodes", type=count, action="append", help="sizes, not those of the page")
    parser.add_argument("--seeds", type=count, default=2, help="of each size (2)")
    parser.add_argument("--policy", choices=sorted(BY_NAME), action="append", help="(the compared)")
    parser.add_argument("--base", default="plain", help="whom the others are compared with (plain)")
    parser.add_argument("--days", type=float, default=0.0, help="(all of the recording)")
    parser.add_argument("--only-tables", action="store_true", help="run nothing")
    return parser.parse_args(argv)


def _asked(args: argparse.Namespace) -> Iterator[Run]:
    names = args.policy or [policy.name for policy in COMPARED]
    for nodes, seed, name in product(args.nodes or [1000], range(args.seeds), names):
        yield Run(policy=name, nodes=nodes, seed=seed, days=args.days)


def _run_all(recording: Recording, runs: Sequence[Run], results: Results) -> None:
    checks: dict[bool, Checks] = {}
    for run in runs:
        if run in results.done:
            continue
        policy = BY_NAME[run.policy]
        theirs = policy.rule is Rule.DLROVER
        began_s = time.process_time()
        figures = play.year(
            recording,
            policy,
            checks.setdefault(theirs, play.checks_of(policy)),
            nodes=run.nodes,
            seed=run.seed,
            doubt=run.doubt,
            days=run.days or None,
        )
        took_s = time.process_time() - began_s
        results.add(Done(run=run, figures=figures, took_s=round(took_s, 1)))
        of = f", {run.doubt.value}" if run.doubt.value else ""
        print(
            f"{run.policy}, {run.nodes:,} nodes, seed {run.seed}{of}: {took_s:.0f} s",
            file=sys.stderr,
        )


if __name__ == "__main__":
    end_as_on_interrupt()
    sys.exit(main())
