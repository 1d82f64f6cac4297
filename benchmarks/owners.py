# SPDX-License-Identifier: Apache-2.0
"""Whether a job's owner is sent every event once, though things break meanwhile: 200 events.

    python -m benchmarks.owners --results FILE        goes on where it stopped

Every event is raised twice, as the watch, the post-mortem and the supervisor raise it, in a real
job of a real Slurm, ten an hour: the hours pass by the owner's own record. Meanwhile nothing
happens, the job's script is killed as soon as the event is raised, slurmctld is killed or started
again, or the filesystem of the owner's home stalls for 3 s. Exits 0 if every event came once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.command import keep, kept
from benchmarks.results import machine_facts, machine_line
from tests.lab import DeadlinePassed, Lab, processes
from tests.lab.installed_site import Site

TROUBLES = ("nothing", "killed", "slurmctld killed", "slurmctld restarted", "home stalls")
KINDS = {"hang": 0.0, "failed": 5.0, "stopped": 10.0}  # how long who raises it waits
_ROUND = 10  # events: what an owner is sent in an hour
_HOUR_S, _STALL_S = 3600.0, 3.0
_STATE = Path(".local/state/slurm-health/messages.json")
# A hang's job runs on; the script of the others ends when the message has been waited for.
_JOB = """#!/bin/bash
until [ -e begin ]; do sleep 0.2; done
{python} - <<'END' &
import os
from slurm_health.system import owner
for _ in range(2):
    owner.tell({kind!r}, "it does", "text", os.environ, wait_s={wait_s})
open("raised-" + os.environ["SLURM_JOB_ID"], "w").close()
END
wait $!
sleep {rest_s}
exit 1
"""


def events(count: int) -> list[dict[str, Any]]:
    """Return all events: every kind with every trouble."""
    kinds, troubles = list(KINDS), len(TROUBLES)
    return [
        {"number": n, "trouble": TROUBLES[n // _ROUND % troubles], "kind": kinds[n % len(kinds)]}
        for n in range(count)
    ]


class Bench:
    """One lab, whose owner's record lies on a network filesystem."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._home = site.lab.home("alice")
        shared = site.lab.paths.shared / "local"
        first = site.lab.nodes[0]
        site.lab.run(["mkdir", "-m", "777", str(shared)], node=first)
        (self._home / ".local").symlink_to(shared)
        site.script(".config/slurm-health.toml", "notify = 'cat >>~/received'\n")
        (self._home / ".config/slurm-health.toml").chmod(0o600)

    def round(self, some: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Raise some events under one trouble; return how often each arrived."""
        site, trouble = self._site, some[0]["trouble"]
        jobs = {}
        for event in some:
            hang = event["kind"] == "hang"
            text = _JOB.format(
                python=sys.executable,
                kind=event["kind"],
                wait_s=KINDS[event["kind"]],
                rest_s=25 if hang else 0,
            )
            argv = ["sbatch", "--parsable", "--mem=50", "--output=out-%j.txt", "--overcommit"]
            path = site.script(f"event-{event['number']}.sh", text)
            jobs[int(site.lab.run([*argv, path], user="alice").stdout)] = event
        # A slurmctld that is killed forgets what has just come.
        begun = {"RUNNING"}.issuperset
        try:
            site.lab.wait_until(lambda: site.jobs().values(), begun, "a start of all jobs", 90)
            (self._home / "begin").touch()
            self._strike(trouble, [*jobs])
            site.lab.wait_until(site.jobs, lambda left: not left, "the end of all jobs", 120)
        except DeadlinePassed:
            # One that was killed may start a job that already runs: Slurm holds the job then, and
            # drains the node.
            site.lab.reset()
        (self._home / "begin").unlink(missing_ok=True)
        # A slurmctld that was killed may have forgotten a job, which ends before its event.
        raised = {n: event for n, event in jobs.items() if (self._home / f"raised-{n}").exists()}
        if not raised:
            return []
        time.sleep(1.0)
        lines = site.read("received").splitlines()
        arrived = Counter((m["job"], m["kind"]) for m in map(json.loads, lines))
        self._pass_an_hour()
        return [
            {**event, "job": job, "arrived": arrived[str(job), event["kind"]]}
            for job, event in raised.items()
        ]

    def _strike(self, trouble: str, jobs: Sequence[int]) -> None:
        lab = self._site.lab
        if trouble == "slurmctld killed":
            lab.kill_slurmctld()
            time.sleep(3.0)
            lab.start_slurmctld()
        elif trouble == "slurmctld restarted":
            lab.restart_slurmctld()
        elif trouble == "home stalls":
            clients = [
                process.pid
                for node in lab.nodes
                for process in processes.on_node(lab.pid(node))
                if process.name.startswith("glusterfs")
            ]
            for pid in clients:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(_STALL_S)
            for pid in clients:
                os.kill(pid, signal.SIGCONT)
        elif trouble == "killed":
            threads = [threading.Thread(target=self._kill, args=(job,)) for job in jobs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _kill(self, job: int) -> None:
        """Kill a job's script as soon as it has raised its event, as if it were the supervisor."""
        raised = self._home / f"raised-{job}"
        self._site.lab.wait_until(raised.exists, bool, f"job {job} raising its event", 120)
        self._site.lab.ask("scancel", "--signal=KILL", "--batch", str(job), check=False)

    def _pass_an_hour(self) -> None:
        path = f"{self._home}/{_STATE}"
        age = (
            "import json, sys; p = sys.argv[1]; d = json.load(open(p));"
            f" d['times_s'] = {{k: v - {_HOUR_S:g} for k, v in d['times_s'].items()}};"
            " json.dump(d, open(p, 'w'))"
        )
        argv = [sys.executable, "-c", age, path]
        self._site.lab.run(argv, user="alice", node=self._site.lab.nodes[0])


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return how many events arrived once, by trouble."""
    rows = []
    for trouble in (*TROUBLES, None):
        own = [run for run in runs if trouble in {None, run["trouble"]}]
        counts = Counter(min(run["arrived"], 2) for run in own)
        rows.append([trouble or "all", str(counts[1]), str(counts[0]), str(counts[2])])
    return tabulate(rows, headers=["meanwhile", "once", "never", "twice"], tablefmt="github")


def main() -> int:
    """Run, print the table, return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.owners", description=__doc__)
    parser.add_argument("--events", type=int, default=200, metavar="N", help="[200]")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep each event here")
    options = parser.parse_args()
    print(machine_line(machine_facts()), end="\n\n", flush=True)
    runs = kept(options.results)
    had = {run["number"] for run in runs}
    left = [event for event in events(options.events) if event["number"] not in had]
    if left:
        with Lab.start(nodes=4, cpus=16, network_filesystem_mb=100) as lab:
            bench = Bench(Site(lab))
            for at in range(0, len(left), _ROUND):
                for run in bench.round(left[at : at + _ROUND]):
                    keep(options.results, run)
                    runs.append(run)
                    print(*(f"{k}={v}" for k, v in run.items()), file=sys.stderr, flush=True)
    print(table(runs))
    print(f"{options.events - len(runs)} not raised: run again")
    return int(any(run["arrived"] != 1 for run in runs) or len(runs) < options.events)


if __name__ == "__main__":
    sys.exit(main())
