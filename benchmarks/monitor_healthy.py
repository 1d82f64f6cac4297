# SPDX-License-Identifier: Apache-2.0
"""Whether the monitor is silent about a training that is well, however uneven its steps are.

    python -m benchmarks.monitor_healthy                          an hour, with a heartbeat
    python -m benchmarks.monitor_healthy --minutes 20 --seed 7 --without-heartbeat

A DDP training (benchmarks/uneven_training.py) on three nodes of the lab. Exits 0 if nothing was
said; 1 if a hang or a slow rank was; 3 if the training did not end as it should.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.check_table import machine_facts, machine_line
from benchmarks.command import end_as_on_interrupt
from tests.e2e.lab_support import Site
from tests.e2e.played_nodes import play, submit
from tests.lab import Lab

_NODES = 3
_TRAINING = Path(__file__).with_name("uneven_training.py")
_SCRIPT = """#!/bin/bash
export OMP_NUM_THREADS=1 MASTER_PORT=$((20000 + SLURM_JOB_ID))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec nice -n 10 srun {python} uneven_training.py "$@"
"""
_SLACK_S = 900.0  # for the start, and for the step and checkpoint in which the time is over


def main() -> int:
    """Train, say what the monitor said, return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.monitor_healthy")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-heartbeat", action="store_true")
    options = parser.parse_args()
    print(machine_line(machine_facts()), flush=True)
    end_as_on_interrupt()
    try:
        with Lab.start(nodes=_NODES, name=f"{Path.cwd().name}-healthy-{os.getpid()}") as lab:
            return _train(Site(lab), options.minutes, options.seed, not options.without_heartbeat)
    except KeyboardInterrupt:
        print("benchmarks.monitor_healthy: interrupted; the lab is down", file=sys.stderr)
        return 130


def _train(site: Site, minutes: float, seed: int, heartbeat: bool) -> int:
    home = site.directory("work")
    site.script("uneven_training.py", _TRAINING.read_text())
    site.script("train.sh", _SCRIPT.format(python=sys.executable))
    play(site)
    job = submit(
        site,
        f"-N{_NODES}",
        "--ntasks-per-node=1",
        "--output=out.txt",
        "--no-requeue",
        "train.sh",
        home,
        str(minutes),
        str(seed),
        script="",
        env={"HEARTBEAT": "1" if heartbeat else "0"},
    )
    state = site.ended(job, 60 * minutes + _SLACK_S)["JobState"]
    lines = site.read("out.txt").splitlines()
    said = [line for line in lines if "monitor:" in line]
    steps = sum(line.startswith("step ") for line in lines)
    checkpoints = sum(line.startswith("checkpoint") for line in lines)
    print(f"{state}: {steps} steps, {checkpoints} checkpoints, seed {seed}")
    print("\n".join(said) or "the monitor said nothing")
    records = site.records(job, writer="monitor")
    if said or any(each["kind"] in {"hang_found", "straggler_found"} for each in records):
        return 1
    return 0 if state == "COMPLETED" else 3


if __name__ == "__main__":
    sys.exit(main())
