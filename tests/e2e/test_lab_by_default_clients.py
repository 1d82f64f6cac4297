# SPDX-License-Identifier: Apache-2.0
"""Programs that submit jobs themselves, on a cluster that has every job checked by default.

The programs are the real ones, and know nothing of slurm-health; what a check measures is played.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.lab.installed_site import DEADLINE_S, Site, check_by_default
from tests.lab.played_nodes import FAKE_WORKER, play

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

RULES = "[default]\nmin_nodes = 1\nmin_time_min = 2\n"
SLURMRESTD = shutil.which("slurmrestd") or shutil.which("slurmrestd", path="/usr/sbin")
SUBMITIT = """
import submitit

def fails():
    raise ValueError("as it happens")

def place(word):
    here = submitit.JobEnvironment()
    return f"{here.global_rank} of {here.num_tasks} {word}"

executor = submitit.AutoExecutor(folder="logs")
executor.update_parameters(nodes=2, tasks_per_node=1, timeout_min=5)
jobs = [*executor.map_array(place, ["one", "two"]), executor.submit(fails)]
said = [[job.task(rank).result() for rank in (0, 1)] for job in jobs[:2]]
error = jobs[2].task(0).exception()
print(*(job.job_id for job in jobs))
print(said, "as it happens" in str(error))
"""
# slurmrestd of a user's own, at a socket, and a job that it is asked for.
REST = """
import http.client, json, os, socket, subprocess, sys, time

server = subprocess.Popen(
    [sys.argv[1], "-a", "rest_auth/local", "-s", "openapi/v0.0.38", f"unix:{os.getcwd()}/rest.sock"]
)

class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect("rest.sock")

script = "#!/bin/sh\\nsrun sh -c 'echo rest $SLURM_NTASKS'\\nexit 3\\n"
job = {"name": "rest", "nodes": 2, "tasks": 2, "standard_output": "rest.out",
       "current_working_directory": os.getcwd(), "environment": dict(os.environ)}
while not os.path.exists("rest.sock") and server.poll() is None:
    time.sleep(0.05)
asked = Connection("slurm")
asked.request("POST", "/slurm/v0.0.38/job/submit", json.dumps({"script": script, "job": job}),
              {"Content-Type": "application/json"})
print(json.loads(asked.getresponse().read())["job_id"])
server.terminate()
server.wait()
"""


def needs(package: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not there, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A cluster on which every job of two minutes or more is checked by default."""
    with Lab.start(nodes=4) as lab:
        site = Site(lab)
        check_by_default(site, RULES)
        play(site)
        yield site


def run(site: Site, *command: str) -> list[str]:
    """Run a command of alice's on the login node; its lines."""
    environ = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "SLURM_HEALTH_PYTHON": str(FAKE_WORKER),
        "FAKE_WORKER_DIR": site.directory("played"),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    done = site.lab.run(list(command), user="alice", env=environ, deadline_s=3 * DEADLINE_S)
    return done.stdout.split("\n")


def python(site: Site, text: str, *words: str) -> list[str]:
    return run(site, sys.executable, site.script("program.py", text), *words)


def levels(site: Site, job: str) -> list[set[str]]:
    """What each attempt's check of a job says of its nodes."""
    site.ended(job)
    return [{node["level"] for node in each["nodes"]} for each in site.report(job)["runs"]]


@pytest.mark.slow
@needs("submitit")
def test_functions_and_arrays_of_submitit_are_checked_and_return_what_they_do(site: Site) -> None:
    jobs, said = python(site, SUBMITIT)[-3:-1]
    assert said == "[['0 of 2 one', '1 of 2 one'], ['0 of 2 two', '1 of 2 two']] True"
    for job in jobs.split():
        assert levels(site, job) == [{"healthy"}]


@pytest.mark.skipif(not SLURMRESTD, reason="slurmrestd is not installed")
def test_a_job_that_a_program_asks_for_over_rest_is_checked(site: Site) -> None:
    (job, *_) = python(site, REST, str(SLURMRESTD))
    assert levels(site, job) == [{"healthy"}]
    assert site.ended(job)["ExitCode"] == "3:0"
    assert site.read("rest.out") == "rest 2\n" * 2


# What each client submits when it is only to be watched.
WAITS = {
    "sbatch": "import subprocess\nprint(subprocess.check_output(['sbatch', '--parsable', '-N2',"
    " '--wrap=srun sleep 300'], text=True))",
    "submitit": SUBMITIT.partition("jobs = ")[0]
    + "import time\nprint(executor.submit(time.sleep, 280).job_id)",
    "REST": REST.replace("srun sh -c 'echo rest $SLURM_NTASKS'", "srun sleep 300"),
}


@pytest.mark.slow
@needs("submitit")
@pytest.mark.skipif(not SLURMRESTD, reason="slurmrestd is not installed")
def test_what_any_client_submits_is_watched_without_a_change(site: Site) -> None:
    for client, text in WAITS.items():
        job = python(site, text, str(SLURMRESTD))[0].strip()
        site.wait_record(job, "progress_seen", writer="monitor")
        site.lab.run(["scancel", job], user="alice")
        assert site.report(job)["runs"][-1]["script"]["seen"], client
