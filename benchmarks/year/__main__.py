# SPDX-License-Identifier: Apache-2.0
"""Which policy keeps training going? A year of a real cluster's faults, replayed.

    python -m benchmarks.year DIR                    all runs that --results lacks, and the tables
    python -m benchmarks.year DIR --nodes=1000 --seeds=5 --policy=plain --policy=best
    python -m benchmarks.year DIR --figures=DIR2     also the pictures

DIR has fault_trace.json of InfiniteHBD-Trace, at any depth. Interrupted, it goes on where it
stopped. docs/explanation/year.md says what is real, what is played, and what came of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.check_table import machine_facts, machine_line
from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt
from benchmarks.year import page, play
from benchmarks.year.checks import Checks
from benchmarks.year.policies import BY_NAME, COMPARED, Policy, Rule
from benchmarks.year.recording import Recording, counted, read
from benchmarks.year.results import Done, Results, Run

TRACE = "fault_trace.json"
# Sizes and how many seeds each has: a large cluster varies less and takes longer.
SIZES = {400: 5, 1000: 5, 4096: 2, 16384: 1}
HALVED = (400, 1000)  # sizes whose table of what is seen is halved too
_OURS = ("defaults", "best")


def main(argv: list[str] | None = None) -> int:
    """Make the runs that are not there yet, print the tables, and return the exit code."""
    args = _arguments(argv)
    found = sorted(args.recordings.rglob(TRACE)) if args.recordings.is_dir() else []
    if not found:
        print(f"benchmarks.year: no {TRACE} below {args.recordings}", file=sys.stderr)
        return 2
    try:
        recording = read(found[0].read_bytes())
    except ValueError as err:
        print(f"benchmarks.year: {found[0]}: {err}", file=sys.stderr)
        return 2
    policies = [BY_NAME[name] for name in args.policy or [each.name for each in COMPARED]]
    results = Results(args.results)
    try:
        if not args.only_tables:
            _run_all(recording, policies, results, args)
    except KeyboardInterrupt:
        print(f"benchmarks.year: interrupted; the runs are in {args.results}", file=sys.stderr)
        return INTERRUPTED
    _print(recording, results, policies, args)
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
    parser.add_argument("--nodes", type=count, action="append", help="sizes (400 to 16,384)")
    parser.add_argument("--seeds", type=count, help="of each size (5 down to 1)")
    parser.add_argument("--policy", choices=sorted(BY_NAME), action="append", help="(the compared)")
    parser.add_argument("--base", default="plain", help="whom the others are compared with (plain)")
    parser.add_argument("--days", type=float, default=0.0, help="(all of the recording)")
    parser.add_argument("--figures", type=Path, help="write the pictures here")
    parser.add_argument("--only-tables", action="store_true", help="run nothing")
    return parser.parse_args(argv)


def _runs(policies: Sequence[Policy], args: argparse.Namespace) -> Iterator[Run]:
    for nodes in args.nodes or SIZES:
        for halved in (False, True) if nodes in HALVED else (False,):
            for seed in range(args.seeds or SIZES.get(nodes, 1)):
                for policy in policies:
                    yield Run(
                        policy=policy.name, nodes=nodes, seed=seed, halved=halved, days=args.days
                    )


def _run_all(
    recording: Recording, policies: Sequence[Policy], results: Results, args: argparse.Namespace
) -> None:
    checks: dict[bool, Checks] = {}
    for run in _runs(policies, args):
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
            halved=run.halved,
            days=run.days or None,
        )
        took_s = time.process_time() - began_s
        results.add(Done(run=run, figures=figures, took_s=round(took_s, 1)))
        of = ", halved" if run.halved else ""
        print(
            f"{run.policy}, {run.nodes:,} nodes, seed {run.seed}{of}: {took_s:.0f} s",
            file=sys.stderr,
        )


def _print(
    recording: Recording, results: Results, policies: Sequence[Policy], args: argparse.Namespace
) -> None:
    facts = counted(recording)
    print(
        f"{facts.faults} faults of {recording.nodes} nodes in {recording.days:.0f} days;"
        f" {facts.relapses} of {facts.repairs} repairs were followed by another within 28 days,"
        f" half of these within {facts.median_gap_h:.0f} h\n"
    )
    names = [policy.name for policy in policies]
    sizes = sorted(args.nodes or SIZES)

    def cells(policy: str, nodes: int, halved: bool) -> Sequence[Done]:
        return results.of(policy, nodes, halved=halved, days=args.days)

    for halved in (False, True):
        for nodes in sizes:
            text = page.table(cells, names, nodes, halved=halved, base=args.base)
            if text:
                said = "; what tests see is halved" if halved else ""
                print(f"## {nodes:,} nodes{said}\n\n{text}\n")
        ours = [name for name in names if name.startswith(_OURS)]
        print(*page.goals(cells, ours, sizes, halved=halved), "", sep="\n")
    print(machine_line(machine_facts()))
    if args.figures is not None:
        args.figures.mkdir(parents=True, exist_ok=True)
        (args.figures / "year-faults.svg").write_text(page.faults_picture(recording))
        made = [nodes for nodes in sizes if any(cells(name, nodes, False) for name in names)]
        (args.figures / "year-ratio.svg").write_text(page.ratio_picture(cells, names, made))


if __name__ == "__main__":
    end_as_on_interrupt()
    sys.exit(main())
