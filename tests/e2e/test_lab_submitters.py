# SPDX-License-Identifier: Apache-2.0
"""Programs that call `sbatch` by its name, with the wrapper that has their jobs checked on PATH.

The programs are the real ones; what a check measures is played.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lab.installed_site import DEADLINE_S, Site
from tests.lab.played_nodes import FAKE_WORKER, FAULTY, play

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed"),
]


SUBMITIT = """
import os, sys, submitit

def place(word):
    here = submitit.JobEnvironment()
    return f"{here.hostname} {here.global_rank} {here.num_tasks} {word}"

executor = submitit.AutoExecutor(folder="logs")
executor.update_parameters(nodes=int(sys.argv[1]), tasks_per_node=1, timeout_min=5)
words = sys.argv[2:]
jobs = executor.map_array(place, words) if words[1:] else [executor.submit(place, *words)]
print(*(job.job_id for job in jobs))
"""
RESULTS = """
import sys, submitit
folder, nodes, *jobs = sys.argv[1:]
for job in jobs:
    found = submitit.SlurmJob(folder=folder, job_id=job, tasks=list(range(int(nodes))))
    print(*found.results(), sep="\\n")
"""
CHECKPOINT = """
import os, time, submitit

class Work(submitit.helpers.Checkpointable):
    def __call__(self):
        if submitit.JobEnvironment().raw_job_id and not os.environ.get("SLURM_RESTART_COUNT"):
            with open("begun", "a") as begun:
                begun.write("x")
            time.sleep(600)
        return "resumed"

executor = submitit.AutoExecutor(folder="logs", slurm_max_num_timeout=2)
executor.update_parameters(nodes=2, tasks_per_node=1, timeout_min=10)
print(executor.submit(Work()).job_id)
"""
INTERRUPT = """
import sys, submitit
submitit.SlurmJob(folder="logs", job_id=sys.argv[1], tasks=[0, 1])._interrupt(timeout=True)
"""


@pytest.fixture
def wrapped(site: Site) -> Site:
    """The site, with the wrapper in a directory of alice's and nodes that are all well."""
    play(site)
    printed = site.health("templates", "sbatch")
    assert printed.returncode == 0, printed
    site.script("bin/sbatch", printed.stdout)
    return site


def run(site: Site, text: str, *words: str) -> list[str]:
    """Run a program of alice's, with the wrapper first on PATH; its last line, in words."""
    program = site.script("program.py", text)
    environ = {
        "PATH": f"{site.lab.home('alice')}/bin:{Path(sys.executable).parent}:/usr/bin:/bin",
        "SLURM_HEALTH_PYTHON": str(FAKE_WORKER),
        "FAKE_WORKER_DIR": site.directory("played"),
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, program, *words]
    done = site.lab.run(command, user="alice", env=environ, deadline_s=2 * DEADLINE_S)
    return done.stdout.split("\n")


def results(site: Site, nodes: int, *jobs: str) -> list[str]:
    """What the function that was submitted has returned, from each task of each job."""
    return [line for line in run(site, RESULTS, "logs", str(nodes), *jobs) if line]


@pytest.mark.heavy
def test_a_function_of_submitit_leaves_a_bad_node(wrapped: Site) -> None:
    play(wrapped, n1=FAULTY)
    (job, *_) = run(wrapped, SUBMITIT, "4", "word")
    wrapped.ended(job)
    hosts = {line.split()[0] for line in results(wrapped, 4, job)}
    assert len(hosts) == 4
    assert "n1" not in hosts


@pytest.mark.slow
def test_a_checkpoint_of_submitit_requeues_a_job_that_is_checked_again(wrapped: Site) -> None:
    begun = wrapped.lab.home("alice") / "begun"
    (job, *_) = run(wrapped, CHECKPOINT)
    # A task whose submitit does not yet wait for the signal would be killed by it.
    in_both = "the function began in both tasks"
    wrapped.lab.wait_until(
        lambda: begun.exists() and begun.read_text() == "xx", bool, in_both, DEADLINE_S
    )
    run(wrapped, INTERRUPT, job)
    wrapped.ended(job, 3 * DEADLINE_S)  # Slurm starts a requeued job after two minutes
    assert results(wrapped, 2, job) == ["resumed", "resumed"]
    runs = wrapped.report(job)["runs"]
    assert [len(run["nodes"]) for run in runs] == [2, 2]
    levels = {node["level"] for run in runs for node in run["nodes"]}
    assert levels <= {"healthy", "inconclusive"}
    assert runs[-1]["script"]["exit_code"] == 0
