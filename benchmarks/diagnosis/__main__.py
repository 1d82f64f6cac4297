# SPDX-License-Identifier: Apache-2.0
"""Which faults of a real training are named rightly, and does any healthy node get accused?

    python -m benchmarks.diagnosis                               every cause 20 times; hours
    python -m benchmarks.diagnosis --runs 1 --labs 2
    python -m benchmarks.diagnosis --only mount --seed 7 --runs 1    one run again
    python -m benchmarks.diagnosis --results build/diagnosis.jsonl   goes on where it stopped
    python -m benchmarks.diagnosis --gpus                        over NCCL on played GPUs

Exits 0 if every run was right; 1 if one was not; 3 if a cause could not be injected.
docs/explanation/evidence.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt, kept
from benchmarks.command import keep as keep_run
from benchmarks.diagnosis.causes import BY_NAME, CAUSES
from benchmarks.diagnosis.judge import Judged, judge
from benchmarks.diagnosis.perform import Interrupted, Run, Trained, keep, stage
from benchmarks.diagnosis.plan import Plan, plan_of, plans
from benchmarks.diagnosis.table import table
from benchmarks.results import machine_facts, machine_line
from tests.lab import LabError
from tests.lab.installed_site import Site
from tests.played_gpu import build

_PLAYED = Path(__file__).parents[2] / ".venv-played"


class Bench:
    """Runs plans, on several labs at once; says how each went."""

    def __init__(
        self,
        wanted: Sequence[Plan],
        labs: int,
        evidence: Path,
        trained: Trained,
        results: Path | None = None,
    ) -> None:
        self.judged: list[Judged] = []
        self.failures: list[str] = []
        self._results = results
        self._evidence, self._trained = evidence, trained
        self._labs = labs
        self._wanted: queue.SimpleQueue[Plan] = queue.SimpleQueue()
        for plan in wanted:
            self._wanted.put(plan)
        self._stop = threading.Event()

    def run(self) -> None:
        """Run all plans; an interrupt ends those that have begun."""
        threads = [threading.Thread(target=self._on_a_lab) for _ in range(self._labs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self._stop.set()
            for thread in threads:
                thread.join()
            raise

    def _on_a_lab(self) -> None:
        """Run plans one after another; on a new lab, where one could not be carried out."""
        try:
            while not (self._stop.is_set() or self._wanted.empty()):
                with stage(self._trained) as site, suppress(queue.Empty):
                    while self._one(site, self._wanted.get_nowait()):
                        pass
        except LabError as err:
            self._say(f"the lab: {err}")
            self.failures.append(str(err))

    def _one(self, site: Site, plan: Plan) -> bool:
        """Carry out a plan; tell whether the lab is good for another."""
        load = round(os.getloadavg()[0], 1)
        try:
            seen = Run(site, plan, self._trained, self._stop.is_set).perform()
        except Interrupted:
            return False
        except (LabError, AssertionError) as err:  # a refused submission asserts
            self.failures.append(f"{plan}: {err}")
            self._say(f"{plan}: NOT INJECTED: {err}")
            return False
        kept = keep(site, seen, self._evidence / f"{plan.cause.name}-{plan.seed}")
        found = judge(
            plan, seen.report, drained=seen.drained, fault_s=seen.fault_s, again_s=seen.again_s
        )
        found = dataclasses.replace(found, load=load, evidence=str(kept) if found.wrong else "")
        self.judged.append(found)
        keep_run(self._results, {**as_object(found), "gpus": self._trained.gpus})
        self._say(_line(found))
        return True

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _line(found: Judged) -> str:
    times = f"found after {found.found_s} s" if found.found_s is not None else "not found"
    if found.again_s is not None:
        times += f", training again after {found.again_s} s"
    said = f"WRONG: {'; '.join(found.wrong)} {found.evidence}" if found.wrong else found.named
    return f"{found.plan}: {said}; {times}; load average {found.load}"


def main() -> int:
    """Run, print the table, return the exit code."""
    options = _parser().parse_args()
    print(machine_line(machine_facts()), end="\n\n", flush=True)
    causes = [BY_NAME[name] for name in options.only] if options.only else CAUSES
    evidence = options.evidence or Path(tempfile.mkdtemp(prefix="diagnosis-"))
    trained = Trained()
    if options.gpus:
        build.ready(_PLAYED)
        trained = Trained(python=_PLAYED / "bin" / "python", gpus=1)
    wanted = list(plans(causes, options.runs, options.seed))
    done = [each for each in judged_before(options.results, trained.gpus) if each.plan in wanted]
    left = [each for each in wanted if each not in [run.plan for run in done]]
    bench = Bench(left, options.labs, evidence, trained, options.results)
    bench.judged += done
    end_as_on_interrupt()
    interrupted = False
    try:
        bench.run()
    except KeyboardInterrupt:
        print("benchmarks.diagnosis: interrupted; the labs are down", file=sys.stderr)
        interrupted = True
    print(table(bench.judged))
    print(*(f"not injected: {each}" for each in bench.failures), sep="\n")
    if interrupted:
        return INTERRUPTED
    if any(each.wrong for each in bench.judged):
        return 1
    return 3 if bench.failures else 0


def judged_before(results: Path | None, gpus: int) -> list[Judged]:
    """Return the runs that were kept of trainings with so many GPUs on each node."""
    return [
        Judged(
            plan=plan_of(BY_NAME[run["cause"]], run["seed"]),
            named=run["named"],
            cause_right=run["cause_right"],
            node_right=run["node_right"],
            accused=tuple(run["accused"]),
            found_s=run["found_s"],
            again_s=run["again_s"],
            wrong=tuple(run["wrong"]),
            load=run["load_average"],
        )
        for run in kept(results)
        if run["gpus"] == gpus
    ]


def as_object(run: Judged) -> dict[str, object]:
    """Return a run as JSON has it."""
    return {
        "cause": run.plan.cause.name,
        "seed": run.plan.seed,
        "step": run.plan.step,
        "rank": run.plan.rank,
        "named": run.named,
        "cause_right": run.cause_right,
        "node_right": run.node_right,
        "accused": run.accused,
        "found_s": run.found_s,
        "again_s": run.again_s,
        "wrong": run.wrong,
        "load_average": run.load,
    }


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {cause.name:9} {cause.title}" for cause in CAUSES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.diagnosis",
        description="Faults in a real training on the lab: is each named, and no healthy node?",
        epilog=f"causes:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=count, default=20, metavar="N", help="of each cause [20]")
    parser.add_argument(
        "--only",
        action="append",
        choices=[cause.name for cause in CAUSES],
        metavar="CAUSE",
        help="this cause; repeatable",
    )
    parser.add_argument(
        "--gpus", action="store_true", help="train over NCCL, on a played GPU of each node"
    )
    parser.add_argument("--labs", type=count, default=1, metavar="K", help="side by side [1]")
    parser.add_argument("--seed", type=int, default=1, help="of the first run of each cause [1]")
    parser.add_argument(
        "--evidence", type=Path, metavar="DIR", help="keep report, output and journal of each here"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="keep each run here, and run none again"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
