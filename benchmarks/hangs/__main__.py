# SPDX-License-Identifier: Apache-2.0
"""How soon hangs are reported, and whether a healthy job is ever called hung: on the lab, by gloo.

    python -m benchmarks.hangs                          six hangs 5 times each, with a heartbeat
                                                        and without, and 100 healthy jobs
    python -m benchmarks.hangs --runs 1 --healthy 0     a quick look
    python -m benchmarks.hangs --only loader --runs 2   one kind
    python -m benchmarks.hangs --results FILE           goes on where it stopped

No script says anything to slurm-health. Exits 0 if every hang was reported in time, and no healthy
job was. docs/explanation/evidence.md has the results.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt, keep, kept
from benchmarks.results import machine_facts, machine_line
from tests.lab import Lab, LabError
from tests.lab.installed_site import Site
from tests.lab.played_nodes import play, submit

HANGS = {
    "first": "rank 1 is stopped at its first step",
    "step": "rank 1 is stopped at step 20 of 0.5 s each",
    "rendezvous": "rank 1 has another port: the rendezvous never forms",
    "skipped": "rank 0 skips an all-reduce",
    "loader": "the data loader of rank 1 reads from a pipe that nobody writes to",
    "sockets": "the packets of the second node are dropped",
}
HEALTHY = (
    *("compile", "checkpoint", "evaluation", "notebook", "service"),
    *("idle", "accumulating", "debugger", "data", "elastic"),
)
CONTROL = "control"  # one whose rank is stopped for a while: the same monitor must report it
LIMIT_S = {"auto": 60.0, "off": 120.0}
SCALE = 0.2  # of all times of healthy jobs, and of the limits that they are measured against
RANKS = 3
_GIVE_UP_S = 240.0
_BEGINS_S = 180.0
_HERE = Path(__file__).parent
_PROLOGUE = """#!/bin/bash
export OMP_NUM_THREADS=1 MASTER_PORT=$((20000 + 2 * (SLURM_JOB_ID % 10000)))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
"""
# As the supervisor starts it, with time compressed.
_WATCHED = """sleep 1000 | {python} -m slurm_health.training.monitor.watch \\
    --after-s=1 --scale={scale} &
"""
_RUNS = "srun --kill-on-bad-exit=1 {python} {script} {how}\n"
_ELASTIC = """srun -N1 -n1 {python} {script} elastic
srun -N2 -n2 {python} {script} elastic
srun -N1 -n1 {python} {script} elastic
"""
_ENDS = "pkill -P $! sleep; kill $(jobs -p) 2>/dev/null; exit 0\n"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run: a kind of hang with or without a heartbeat, or a healthy kind (no `heartbeat`)."""

    kind: str
    heartbeat: str
    number: int


class Bench:
    """Carries out plans on one lab, several at once, each on nodes of its own."""

    def __init__(self, site: Site, plans: Sequence[Plan], at_once: int, results: Path | None):
        self.runs: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._site, self._at_once, self._results = site, at_once, results
        self._plans: queue.SimpleQueue[Plan] = queue.SimpleQueue()
        for plan in plans:
            self._plans.put(plan)
        self._lock, self._stop = threading.Lock(), threading.Event()

    def run(self) -> None:
        """Carry out all plans; an interrupt ends those that have begun."""
        nodes = self._site.lab.nodes
        sets = [nodes[at : at + RANKS] for at in range(0, RANKS * self._at_once, RANKS)]
        threads = [threading.Thread(target=self._work, args=(some,)) for some in sets]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self._stop.set()
            raise

    def _work(self, nodes: Sequence[str]) -> None:
        while not self._stop.is_set():
            try:
                plan = self._plans.get_nowait()
            except queue.Empty:
                return
            try:
                run = self._hang(plan, nodes) if plan.heartbeat else self._healthy(plan, nodes)
            except (LabError, AssertionError) as err:
                self.failures.append(f"{plan}: {err}")
                continue
            run |= {
                "kind": plan.kind,
                "heartbeat": plan.heartbeat,
                "number": plan.number,
                "load": round(os.getloadavg()[0], 1),
            }
            with self._lock:
                self.runs.append(run)
                keep(self._results, run)
                print(*(f"{name}={value}" for name, value in run.items()), file=sys.stderr)

    def _hang(self, plan: Plan, nodes: Sequence[str]) -> dict[str, Any]:
        """Let a training hang; return after how long that was reported, and how."""
        site = self._site
        number = submit(
            site,
            *("-N3", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}", "--no-requeue"),
            *("--output=out-%j.txt", f"--heartbeat={plan.heartbeat}", f"hang-{plan.kind}.sh"),
            script="",
        )
        mark = site.lab.home("alice") / f"hung-{number}"
        try:
            self._await(mark.exists, f"{plan} to hang", _BEGINS_S)
            hung_s = float(mark.read_text())
            if plan.kind == "sockets":
                hung_s = time.time()
                site.lab.fault.drop(nodes[1])
            until_s = time.time() + _GIVE_UP_S
            hang = None
            while hang is None and time.time() < until_s and not self._stop.is_set():
                time.sleep(0.5)
                hang = next(
                    (
                        record
                        for record in site.records(number, writer="monitor")
                        if record["kind"] == "training_event" and record["event"] == "hang"
                    ),
                    None,
                )
        finally:
            if plan.kind == "sockets":
                site.lab.fault.clear(nodes[1])
            site.lab.ask("scancel", "--signal=KILL", "--full", str(number), check=False)
            site.ended(number)
        if hang is None:
            return {"found_s": None, "cause": "", "nodes": []}
        cause = hang.get("diagnosed") or {}
        return {
            "found_s": round(hang["time_s"] - hung_s, 1),
            "cause": cause.get("cause", ""),
            "nodes": cause.get("nodes", []),
            "ranks": cause.get("ranks", []),
            "sureness": cause.get("sureness", ""),
            "expected": [nodes[0 if plan.kind == "skipped" else 1]],
        }

    def _healthy(self, plan: Plan, nodes: Sequence[str]) -> dict[str, Any]:
        """Run a healthy job to its end; return what was said of it."""
        site = self._site
        submitted = site.lab.run(
            [
                *("sbatch", "--parsable", "-N2", "--ntasks-per-node=1"),
                *(f"--nodelist={','.join(nodes[:2])}", "--output=out-%j.txt"),
                f"healthy-{plan.kind}.sh",
            ],
            user="alice",
        )
        number = int(submitted.stdout)
        ended = site.ended(number, 400.0)
        output = site.read(f"out-{number}.txt")
        said = [line for line in output.splitlines() if "slurm-health: monitor:" in line]
        return {"state": ended["JobState"], "said": said}

    def _await(self, holds: Any, what: str, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > until_s or self._stop.is_set():
                raise LabError(f"waited {limit_s:g} s for {what}")
            time.sleep(0.2)


def _scripts(site: Site) -> None:
    python = sys.executable
    for name in ("training.py", "healthy.py"):
        site.script(name, (_HERE / name).read_text())
    for how in HANGS:
        runs = _RUNS.format(python=python, script="training.py", how=how)
        site.script(f"hang-{how}.sh", _PROLOGUE + runs)
    for kind in (*HEALTHY, CONTROL):
        runs = _ELASTIC if kind == "elastic" else _RUNS
        watched = _WATCHED.format(python=python, scale=SCALE)
        runs = runs.format(python=python, script="healthy.py", how=kind)
        site.script(f"healthy-{kind}.sh", _PROLOGUE + watched + runs + _ENDS)


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return how soon each kind of hang was reported, as what, and which healthy jobs were."""
    rows = []
    for heartbeat, limit_s in LIMIT_S.items():
        for kind, what in HANGS.items():
            own = [r for r in runs if (r["kind"], r["heartbeat"]) == (kind, heartbeat)]
            times = [run["found_s"] for run in own if run["found_s"] is not None]
            spread = f"{statistics.median(times):.0f} (max {max(times):.0f})" if times else "–"  # noqa: RUF001
            in_time = sum(seconds <= limit_s for seconds in times)
            causes = ", ".join(sorted({run["cause"] or "nothing" for run in own}))
            if own:
                rows.append([what, heartbeat, f"{in_time} of {len(own)}", spread, causes])
    headers = ["hang", "--heartbeat", "in time", "reported after, s", "as"]
    parts = [tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)]
    rows = []
    for kind in (*HEALTHY, CONTROL):
        own = [run for run in runs if run["kind"] == kind and not run["heartbeat"]]
        if own:
            false = sum(any("hang" in line for line in run["said"]) for run in own)
            rows.append([kind, str(len(own)), str(false)])
    if rows:
        parts.append(
            tabulate(rows, headers=["healthy job", "runs", "called hung"], tablefmt="github")
        )
    return "\n\n".join(parts)


def main() -> int:
    """Run, print the tables, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hangs", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="of each hang [5]")
    parser.add_argument("--healthy", type=int, default=10, metavar="N", help="of each kind [10]")
    parser.add_argument(
        "--only", action="append", choices=[*HANGS, *HEALTHY, CONTROL], metavar="KIND"
    )
    parser.add_argument("--heartbeat", choices=list(LIMIT_S), help="[both]")
    parser.add_argument("--at-once", type=count, default=4, metavar="K", help="jobs [4]")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep each run here")
    options = parser.parse_args()
    print(machine_line(machine_facts()), end="\n\n", flush=True)
    heartbeats = [options.heartbeat] if options.heartbeat else list(LIMIT_S)
    plans = [
        Plan(kind=kind, heartbeat=heartbeat, number=number)
        for number in range(options.runs)
        for heartbeat in heartbeats
        for kind in HANGS
    ]
    plans += [
        Plan(kind=kind, heartbeat="", number=number)
        for number in range(options.healthy)
        for kind in (*HEALTHY, *([CONTROL] if number == 0 else []))
    ]
    plans = [plan for plan in plans if not options.only or plan.kind in options.only]
    done = kept(options.results)
    had = {(run["kind"], run["heartbeat"], run["number"]) for run in done}
    left = [plan for plan in plans if (plan.kind, plan.heartbeat, plan.number) not in had]
    end_as_on_interrupt()
    with Lab.start(nodes=RANKS * options.at_once) as lab:
        site = Site(lab)
        play(site)
        _scripts(site)
        bench = Bench(site, left, options.at_once, options.results)
        try:
            bench.run()
        except KeyboardInterrupt:
            return INTERRUPTED
    runs = [*done, *bench.runs]
    print(table(runs))
    print(*(f"not carried out: {failure}" for failure in bench.failures), sep="\n")
    late = [
        run
        for run in runs
        if run["heartbeat"]
        and (run["found_s"] is None or run["found_s"] > LIMIT_S[run["heartbeat"]])
    ]
    false = [
        run
        for run in runs
        if "said" in run and any("hang" in line for line in run["said"]) != (run["kind"] == CONTROL)
    ]
    return 1 if late or false else 3 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
