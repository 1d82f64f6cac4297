# SPDX-License-Identifier: Apache-2.0
"""From a lost node to the first step of the training on the spare, on a real Slurm.

    python -m benchmarks.restarts --runs 5
    python -m benchmarks.restarts --loss power --keep-logs DIR

A DDP training over gloo runs on three of four nodes (`--spares=1 --keep-spares`). A node is lost:
its slurmd is killed, or nothing passes from and to it any more. Exits 0 if training went on from
its checkpoint each time; 1 if it did not once; 3 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from os import getloadavg
from pathlib import Path

from tabulate import tabulate

from benchmarks.check_table import machine_facts, machine_line
from benchmarks.command import INTERRUPTED, count, end_as_on_interrupt
from slurm_health.system import journal
from tests.e2e.lab_support import ENDED, Site
from tests.lab import Lab, LabError

SLURMD_TIMEOUT_S = 10
LOST = "n3"
# What ends each span, in order; the first begins when Slurm calls the node down.
SPANS = (
    "the script's end, after Slurm lost the node",
    "its post-mortem, and what follows it",
    "the check of the others",
    "the new start of the script",
    "its ranks begin: srun, torch, rendezvous, checkpoint",
    "their first step",
)
_DEADLINE_S = 240.0
_TRAINING = Path(__file__).parents[1] / "tests" / "support" / "resuming_training.py"
_SCRIPT = f"""\
#!/bin/bash
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((29500 + SLURM_HEALTH_RESTART_COUNT)) OMP_NUM_THREADS=1
exec srun --kill-on-bad-exit=1 {sys.executable} \\
    resuming_training.py ck-$SLURM_JOB_ID.pt 100000 wait 3 -1
"""
_BEGINS = re.compile(r"^rank 0 on \S+ begins at (\d+), restart 1, at ([\d.]+)", re.MULTILINE)
_MOMENTS = {
    "script_ended": "ended",
    "failure_planned": "planned",
    "verdict_reached": "verdict",
    "script_started": "started",
}
_STEP = re.compile(r"^step (\d+) at ([\d.]+)", re.MULTILINE)


class NotMeasured(Exception):
    """A run that did not come to a first step on the spare; says how far it came."""


def main() -> int:
    """Measure, print the table, return the exit code."""
    options = _parser().parse_args()
    print(machine_line(machine_facts()), end="\n\n", flush=True)
    end_as_on_interrupt()
    runs: list[list[float]] = []
    failed = 0
    try:
        for number in range(options.runs):
            load = getloadavg()[0]
            try:
                runs.append(measure(options.loss, options.keep_logs))
            except (NotMeasured, LabError) as err:
                failed += 1
                print(f"run {number + 1}: {err}", file=sys.stderr, flush=True)
                continue
            spans = " + ".join(f"{each:.1f}" for each in runs[-1])
            said = f"run {number + 1}: {sum(runs[-1]):.1f} s = {spans}, load average {load:.1f}"
            print(said, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    print(table(runs))
    if failed:
        return 1
    return 0 if runs else 3


def table(runs: list[list[float]]) -> str:
    """Return each span's seconds, and their sum."""
    if not runs:
        return "nothing measured"
    columns = [*zip(*runs, strict=True), [sum(run) for run in runs]]
    names = [*SPANS, "from the loss as Slurm knows it to the first step"]
    rows = [
        [name, f"{statistics.median(each):.1f}", f"{min(each):.1f} … {max(each):.1f}"]
        for name, each in zip(names, columns, strict=True)
    ]
    return tabulate(rows, headers=["span", "median s", "min … max"], tablefmt="github")


def measure(loss: str, logs: Path | None) -> list[float]:
    """Lose a node of a training; return the seconds of each span.

    Raises:
        NotMeasured: the training did not go on.
    """
    with Lab.start(nodes=4, slurm_conf_extra=f"SlurmdTimeout={SLURMD_TIMEOUT_S}") as lab:
        site = Site(lab)
        try:
            return _measured(site, loss)
        finally:
            if logs is not None:
                shutil.copytree(lab.paths.log, logs / f"{time.time():.0f}")


def _measured(site: Site, loss: str) -> list[float]:
    lab = site.lab
    site.script("resuming_training.py", _TRAINING.read_text())
    site.script("train.sh", _SCRIPT)
    words = ("-N3", "--ntasks-per-node=1", "--spares=1", "--keep-spares", "train.sh")
    job = site.submit(*words)

    def output() -> str:
        return site.read(f"slurm-{job}.out")

    _await(lambda: "step 4 " in output(), site, job, "its first steps")
    if loss == "slurmd":
        lab.fault.kill_slurmd(LOST)
    else:
        lab.fault.drop(LOST, everything=True)
    _await(lambda: "DOWN" in lab.ask("scontrol", "show", "node", LOST).stdout, site, job, "DOWN")
    known_s = time.time()
    _await(lambda: _BEGINS.search(output()), site, job, "its second start")
    begins = _BEGINS.search(output())
    assert begins is not None
    at, began_s = int(begins[1]), float(begins[2])

    def first_step() -> float:
        later = [float(s) for step, s in _STEP.findall(output()) if int(step) >= at]
        return next((each for each in later if each > began_s), 0.0)

    _await(first_step, site, job, "a step after it")
    if at == 0:
        raise NotMeasured("it began again at step 0, without its checkpoint")
    moments = {**_recorded(site, job), "begins": began_s, "step": first_step()}
    site.lab.run(["scancel", str(job)])
    order = ("ended", "planned", "verdict", "started", "begins", "step")
    times = [known_s, *(moments[name] for name in order)]
    return [later - sooner for sooner, later in itertools.pairwise(times)]


def _recorded(site: Site, job: int) -> Mapping[str, float]:
    """Return when what happened between the two starts, as the journal has it."""
    entries = [
        *site.records(job, writer=journal.SUPERVISOR),
        *site.records(job, writer=journal.RESTART),
        *site.records(job, "0-2"),
    ]
    found: dict[str, float] = {}
    for entry in entries:
        name = _MOMENTS.get(entry["kind"], "")
        if name != "started" or entry.get("restart") == 1:
            found[name] = entry["time_s"]
    return found


def _await(condition: object, site: Site, job: int, what: str) -> None:
    assert callable(condition)
    give_up_s = time.monotonic() + _DEADLINE_S
    while not condition():
        state = site.lab.job(job).get("JobState", "")
        if state in ENDED or time.monotonic() > give_up_s:
            said = site.read(f"slurm-{job}.out")[-2000:]
            raise NotMeasured(f"the job is {state} and did not come to {what}:\n{said}")
        time.sleep(0.1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.restarts",
        description="From a lost node to the first step of the training on the spare, on the lab.",
    )
    parser.add_argument("--runs", type=count, default=3, metavar="K", help="how often [3]")
    parser.add_argument(
        "--loss", choices=("slurmd", "power"), default="slurmd", help="how it is lost [slurmd]"
    )
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="copy Slurm's logs there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
