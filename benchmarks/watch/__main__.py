# SPDX-License-Identifier: Apache-2.0
"""What a watch that no user asked for reports: hangs of seven kinds of jobs, and healthy jobs.

    python -m benchmarks.watch                                37 scenes 4 times, 1,000 job-hours
    python -m benchmarks.watch --runs 1 --healthy-hours 0     a quick look
    python -m benchmarks.watch --only ddp/link --runs 2       one scene
    python -m benchmarks.watch --results FILE                 goes on where it stopped

All times of the watch and of the jobs are multiplied by one factor, `--scale` for hangs and
`--healthy-scale`; what is printed is in times of a real job. The truth of a scene is in the
results before it runs. Exits 0 if 95 % of the hangs were reported in 120 s with node, rank and
cause, and no healthy job was. docs/explanation/evidence.md has the results.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt, keep, kept
from benchmarks.results import machine_facts, machine_line
from benchmarks.watch.scenes import (
    HANGS,
    HEALTHY,
    JOBS,
    OUTSIDE,
    Plan,
    is_right,
    plans,
)
from tests.lab import Lab, LabError
from tests.lab.installed_site import Site, records_in
from tests.lab.layout import CHECKOUT

LIMIT_S, LEAST_SHARE = 120.0, 0.95
NODES = 4  # of a hang's job at most
_AFTER_S = 60.0  # as `supervisor.PATIENCE.unasked_after_s`
_BEGINS_S = 300.0  # until it hangs, at the most
_HERE = Path(__file__).parent
_DATA = Path("/tmp/watched")  # of a node
_PROLOGUE = """#!/bin/bash
export OMP_NUM_THREADS=1 WATCHED_JOB=$SLURM_JOB_ID
export MASTER_PORT=$((20000 + 2 * (SLURM_JOB_ID % 10000)))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
run=$HOME/watch/lab/$SLURM_JOB_ID/0; mkdir -p $run
"""
# As the supervisor starts it, with time compressed.
_WATCHED = """sleep 100000 | {python} -m slurm_health.training.monitor.watch --quiet \\
    --after-s={after_s} --scale={scale} --directory=$run --script-source=$0 &
"""
_TASK = """#!/bin/bash
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
[ "$2/$3" = "rendezvous/$RANK" ] && export MASTER_PORT=$((MASTER_PORT + 1))
exec {python} training.py "$@"
"""
_CONTAINER = """#!/bin/bash
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
[ "$2/$3" = "rendezvous/$RANK" ] && export MASTER_PORT=$((MASTER_PORT + 1))
names="RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS WATCHED_JOB PATH HOME"
[ $((SLURM_JOB_ID % 2)) = 0 ] && names=$(compgen -e)
for name in $names; do [[ ${{!name}} == *[[:space:]]* ]] || kept+=("$name=${{!name}}"); done
env -i "${{kept[@]}}" \\
    unshare --user --map-root-user --pid --fork --mount-proc \\
    /bin/sh -c '"$@"; exit' sh {python} training.py "$@"
"""
_TORCHRUN = """#!/bin/bash
[ "$2/$SLURM_NODEID" = rendezvous/0 ] && date +%s.%N >hung-$WATCHED_JOB
[ "$2/$SLURM_NODEID" = "rendezvous/$(($3 / 2))" ] && MASTER_PORT=$((MASTER_PORT + 1))
exec {python} -m torch.distributed.run --nnodes=$SLURM_NNODES --node-rank=$SLURM_NODEID \\
    --nproc-per-node=2 --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT training.py "$@"
"""
_STARTS = {
    "torchrun": "srun -n $SLURM_NNODES --ntasks-per-node=1 ./torchrun.sh {words}\n",
    "mpi": "mpirun --map-by node --mca btl tcp,self /usr/bin/python3 training.py {words}\n",
    "container": "srun --kill-on-bad-exit=1 ./container.sh {words}\n",
}
_RUNS = "srun --kill-on-bad-exit=1 ./task.sh {words}\n"
_HEALTHY = "srun --kill-on-bad-exit=1 {python} healthy.py {words}\n"
_ELASTIC = """srun -N1 -n1 {python} healthy.py {words}
srun -N2 -n2 {python} healthy.py {words}
srun -N1 -n1 {python} healthy.py {words}
"""
_ENDS = "pkill -P $! sleep; kill $(jobs -p) 2>/dev/null; exit 0\n"


class Bench:
    """Carries out plans on one lab, several at once, hangs on nodes of their own."""

    def __init__(self, site: Site, options: argparse.Namespace) -> None:
        self.runs: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._site, self._options = site, options
        self._lock, self._stop = threading.Lock(), threading.Event()
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
        self._commit = told.stdout.strip()

    def run(self, left: Sequence[Plan]) -> None:
        """Carry out all plans; an interrupt ends those that have begun."""
        hangs: queue.SimpleQueue[Plan] = queue.SimpleQueue()
        healthy: queue.SimpleQueue[Plan] = queue.SimpleQueue()
        for plan in left:
            (hangs if plan.how else healthy).put(plan)
        nodes = self._site.lab.nodes
        used = NODES * self._options.at_once
        sets = [nodes[at : at + NODES] for at in range(0, used, NODES)]
        threads = [threading.Thread(target=self._work, args=(self._hang, hangs, s)) for s in sets]
        threads += [
            threading.Thread(target=self._work, args=(self._healthy, healthy, nodes[used:]))
            for _ in range(self._options.healthy_at_once)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self._stop.set()
            raise

    def _work(
        self,
        perform: Callable[[Plan, Sequence[str]], dict[str, Any]],
        left: queue.SimpleQueue[Plan],
        nodes: Sequence[str],
    ) -> None:
        while not self._stop.is_set():
            try:
                plan = left.get_nowait()
            except queue.Empty:
                return
            about = {"kind": plan.kind, "how": plan.how, "number": plan.number}
            about |= {"commit": self._commit, "load": round(os.getloadavg()[0], 1)}
            about["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            if plan.how:
                about["truth"] = plan.truth(nodes)
            self._keep({"begun": about})
            try:
                run = about | perform(plan, nodes)
            except (LabError, AssertionError, ValueError) as err:
                self.failures.append(f"{plan}: {err}")
                continue
            with self._lock:
                self.runs.append(run)
            self._keep(run)
            print(*(f"{name}={value}" for name, value in run.items()), file=sys.stderr)

    def _keep(self, run: dict[str, Any]) -> None:
        with self._lock:
            keep(self._options.results, run)

    def _submit(self, plan: Plan, *words: str, text: str) -> int:
        name = f"{plan.kind}-{plan.how or 'healthy'}-{plan.number}.sh"
        script = self._site.script(name, text)
        argv = ["sbatch", "--parsable", "--overcommit", "--mem=100", "--output=out-%j.txt"]
        return int(self._site.lab.run([*argv, *words, script], user="alice").stdout)

    def _text(self, starts: str, scale: float, words: str) -> str:
        watched = _WATCHED.format(python=sys.executable, scale=scale, after_s=_AFTER_S * scale)
        return _PROLOGUE + watched + starts.format(python=sys.executable, words=words) + _ENDS

    def _records(self, job: int) -> list[dict[str, Any]]:
        directory = self._site.lab.home("alice") / "watch" / "lab" / str(job) / "0"
        return records_in(directory / "monitor.jsonl")

    def _events(self, job: int) -> list[dict[str, Any]]:
        return [record for record in self._records(job) if record["kind"] == "training_event"]

    def _hang(self, plan: Plan, nodes: Sequence[str]) -> dict[str, Any]:
        """Let a job hang; return after how long that was reported, in its own time, and how."""
        site, scale = self._site, self._options.scale
        nodes = nodes[: plan.nodes]
        words = f"{plan.kind} {plan.how} {plan.culprit} {scale:g}"
        job = self._submit(
            plan,
            *(f"-N{plan.nodes}", f"--ntasks-per-node={plan.on_node}"),
            *(f"--nodelist={','.join(nodes)}", "--no-requeue", "--exclusive"),
            text=self._text(_STARTS.get(plan.kind, _RUNS), scale, words),
        )
        mark = site.lab.home("alice") / f"hung-{job}"
        hangs: list[dict[str, Any]] = []
        with contextlib.ExitStack() as stack:
            stack.callback(self._end, job)
            self._await(mark.exists, f"{plan} to hang (job {job})", _BEGINS_S)
            hung_s = float(mark.read_text())
            if plan.how in OUTSIDE:
                stack.enter_context(self._struck(plan.how, nodes[plan.culprit // plan.on_node]))
                hung_s = time.time()
            until_s = time.time() + 3 * LIMIT_S * scale
            while not hangs and time.time() < until_s and not self._stop.is_set():
                time.sleep(0.2)
                hangs = [event for event in self._events(job) if event["event"] == "hang"]
        if not hangs:
            return {"job": job, "found_s": None, "cause": "", "nodes": [], "ranks": []}
        cause = hangs[0]["diagnosed"]
        return {
            "job": job,
            "found_s": round((hangs[0]["time_s"] - hung_s) / scale, 1),
            **{name: cause.get(name) or [] for name in ("nodes", "ranks")},
            **{name: cause.get(name) for name in ("cause", "description", "sureness")},
        }

    def _end(self, job: int) -> None:
        self._site.lab.ask("scancel", "--signal=KILL", "--full", str(job), check=False)
        self._site.ended(job)

    @contextlib.contextmanager
    def _struck(self, how: str, node: str) -> Iterator[None]:
        """While active, a node has a fault."""
        lab = self._site.lab
        if how == "link":
            lab.fault.drop(node)
            try:
                yield
            finally:
                lab.fault.clear(node)
            return
        argv = [sys.executable, "-m", "benchmarks.diagnosis.hung_mount", str(_DATA)]
        process = lab.popen(argv, node=node, cwd=CHECKOUT, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise LabError(f"no filesystem could be mounted on {node}")
            yield
        finally:
            process.kill()  # its readers get an error, and may end
            process.wait()
            lab.run(["umount", "-l", str(_DATA)], node=node, check=False)

    def _healthy(self, plan: Plan, _: Sequence[str]) -> dict[str, Any]:
        """Run a healthy job to its end; return for how long, and what was reported of it."""
        scale, hours = self._options.healthy_scale, self._options.hours
        elastic = plan.kind == "elastic"
        text = self._text(
            _ELASTIC if elastic else _HEALTHY,
            scale,
            f"{plan.kind} {scale:g} {hours / 3 if elastic else hours:g}",
        )
        size = ["-N2", "-n2"] if elastic else ["-N1", "-n2"]
        hung = ",".join(self._site.lab.nodes[: NODES * self._options.at_once])
        began_s = time.time()
        job = self._submit(plan, *size, f"--exclude={hung}", "--no-requeue", text=text)
        limit_s = 2 * 3600 * hours * scale + 600
        try:
            self._await(
                lambda: self._site.lab.job(job)["JobState"] == "RUNNING", "a start", limit_s
            )
            began_s = time.time()
            self._await(
                lambda: self._site.lab.job(job)["JobState"] != "RUNNING", "its end", limit_s
            )
            state = self._site.lab.job(job)["JobState"]
        finally:
            self._end(job)
        events = [e for e in self._events(job) if e["event"] != "hang over"]
        return {
            "job": job,
            "state": state,
            "hours": round((time.time() - began_s) / scale / 3600, 2),
            "records": len(self._records(job)),
            "reported": [e["event"] + ": " + e["diagnosed"]["description"] for e in events],
        }

    def _await(self, holds: Callable[[], bool], what: str, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > until_s or self._stop.is_set():
                raise LabError(f"waited {limit_s:g} s for {what}")
            time.sleep(0.5 if limit_s <= _BEGINS_S else 3.0)


def _scripts(site: Site) -> None:
    for name in ("training.py", "healthy.py"):
        site.script(name, (_HERE / name).read_text())
    site.script("task.sh", _TASK.format(python=sys.executable))
    site.script("torchrun.sh", _TORCHRUN.format(python=sys.executable))
    site.script("container.sh", _CONTAINER.format(python=sys.executable))
    for node in site.lab.nodes:
        place = site.lab.paths.tmp(node) / _DATA.name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / "batch").write_bytes(bytes(4096))


def p95(times: Sequence[float]) -> float:
    """Return the time within which 95 of 100 came, nothing for those that never did."""
    return sorted(times)[max(0, -(-95 * len(times) // 100) - 1)]


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return how many hangs of each scene were reported rightly, how soon, and false alarms."""
    parts = []
    for field, names in (("kind", JOBS), ("how", HANGS)):
        rows = []
        for name, what in [*names.items(), (None, "all")]:
            own = [run for run in runs if run["how"] and name in {None, run[field]}]
            if own:
                right = sum(is_right(run) for run in own)
                times = [float("inf") if r["found_s"] is None else r["found_s"] for r in own]
                wrong = {f"{r['cause'] or 'nothing'}" for r in own if not is_right(r)}
                latest = p95(times)
                shown = f"{latest:.0f}" if latest < float("inf") else "not reported"
                rows.append([what, f"{right} of {len(own)}", shown, ", ".join(sorted(wrong))])
        headers = ["hang", "node, rank and cause", "reported after, s (p95)", "else"]
        parts.append(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    rows = []
    for kind in (*HEALTHY, None):
        own = [run for run in runs if not run["how"] and kind in {None, run["kind"]}]
        if own:
            false = sum(bool(run["reported"]) for run in own)
            hours = sum(run["hours"] for run in own)
            rows.append([kind or "all", str(len(own)), f"{hours:.0f}", str(false)])
    headers = ["healthy job", "runs", "job-hours", "reported"]
    parts.append(tabulate(rows, headers=headers, tablefmt="github"))
    return "\n\n".join(parts)


def main() -> int:
    """Run, print the tables, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch", description=__doc__)
    parser.add_argument("--runs", type=int, default=4, metavar="N", help="of each scene [4]")
    parser.add_argument("--healthy-hours", type=float, default=1000.0, metavar="H", help="[1000]")
    parser.add_argument("--hours", type=float, default=4.0, help="of each healthy job [4]")
    parser.add_argument("--only", action="append", metavar="KIND[/HOW]", default=[])
    parser.add_argument("--scale", type=float, default=0.25, help="of all times of hangs [0.25]")
    parser.add_argument("--healthy-scale", type=float, default=0.04, help="[0.04]")
    parser.add_argument("--at-once", type=count, default=3, metavar="K", help="hangs [3]")
    parser.add_argument("--healthy-at-once", type=count, default=20, metavar="K", help="[20]")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep each run here")
    parser.add_argument("--table", action="store_true", help="only print what was kept")
    options = parser.parse_args()
    print(machine_line(machine_facts()), end="\n\n", flush=True)
    healthy = round(options.healthy_hours / options.hours / len(HEALTHY))
    wanted = plans(options.runs, healthy)
    if options.only:
        both = {plan: {plan.kind, f"{plan.kind}/{plan.how}"} for plan in wanted}
        wanted = [plan for plan in wanted if both[plan] & set(options.only)]
    done = [run for run in kept(options.results) if "begun" not in run]
    had = {(run["kind"], run["how"], run["number"]) for run in done}
    left = [plan for plan in wanted if (plan.kind, plan.how, plan.number) not in had]
    keys = {(plan.kind, plan.how, plan.number) for plan in wanted}
    done = [run for run in done if (run["kind"], run["how"], run["number"]) in keys]
    bench = None
    if left and not options.table:
        end_as_on_interrupt()
        nodes = NODES * options.at_once + 4
        with Lab.start(nodes=nodes, cpus=64, memory_mb=64000) as lab:
            site = Site(lab)
            _scripts(site)
            bench = Bench(site, options)
            try:
                bench.run(left)
            except KeyboardInterrupt:
                return INTERRUPTED
    runs = [*done, *(bench.runs if bench else [])]
    print(table(runs))
    print(*(f"not carried out: {why}" for why in (bench.failures if bench else [])), sep="\n")
    hangs = [run for run in runs if run["how"]]
    late = [r for r in hangs if r["found_s"] is None or r["found_s"] > LIMIT_S or not is_right(r)]
    false = [run for run in runs if not run["how"] and run["reported"]]
    return int(bool(false) or len(late) > (1 - LEAST_SHARE) * len(hangs))


if __name__ == "__main__":
    sys.exit(main())
