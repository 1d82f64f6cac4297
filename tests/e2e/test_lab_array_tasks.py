# SPDX-License-Identifier: Apache-2.0
"""What ends the hanging training of one task of an array leaves the other tasks alone.

The task that Slurm starts last has the number of the whole array, and whoever gives Slurm that
number means every task.
"""

from __future__ import annotations

import sys

import pytest

from tests.lab import Lab
from tests.lab.installed_site import Site

pytestmark = pytest.mark.lab

# As the supervisor ends steps before it starts a script again, and as the monitor cancels.
ACTS = """
import os, signal
from slurm_health.preflight.supervisor.script_process import end_steps
from slurm_health.records.script_records import Diagnosed, EventKind, TrainingEvent
from slurm_health.training.monitor.events import Events, acting

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
end_steps(dict(os.environb), mask=())
where = {"nodes": ["n1"], "ranks": [0], "attribution": "unknown", "description": "it is gone"}
found = Diagnosed(sureness="certain", cause="rank-gone", **where)
hang = TrainingEvent(event=EventKind.HANG, stalled_s=60, usual_s=30, step=1, diagnosed=found)
acting("stop", os.environ)(hang, Events(None, os.environ))
"""
TASK = f"""#!/bin/bash
cd
here=$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID
srun --overlap sleep 600 &
until [ -e go-$here ]; do sleep 0.1; done
{sys.executable} -c '{ACTS}' >said-$here 2>&1
wait
"""


@pytest.mark.parametrize("task", [0, 1])
def test_the_steps_and_the_job_of_one_task_are_ended_and_those_of_the_other_run_on(
    site: Site, task: int
) -> None:
    lab = site.lab
    # On one node, and with room for both.
    array = lab.sbatch(TASK, "-wn1", "--mem=100M", "--array=0-1", "--output=/dev/null")
    other = f"{array}_{1 - task}"
    lab.wait_until(lambda: [steps(lab, f"{array}_{each}") for each in (0, 1)], all, "a step", 60)

    lab.run(["sh", "-c", f"touch ~/go-{array}-{task}"], user="alice")
    lab.wait_job(f"{array}_{task}", {"CANCELLED"})

    said = lab.run(["sh", "-c", f"cat ~/said-{array}-{task}"], user="alice").stdout
    assert "the job is cancelled because it hangs (--monitor=stop)" in said
    assert "could not" not in said
    assert lab.job(other)["JobState"] == "RUNNING"
    assert steps(lab, other)
    lab.run(["scancel", str(array)], user="alice")


def steps(lab: Lab, task: str) -> list[str]:
    shown = lab.ask("squeue", "--noheader", "--steps", f"--jobs={task}", "--format=%i").stdout
    return [step for step in shown.split() if step.rpartition(".")[2].isdigit()]
