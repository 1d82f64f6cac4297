# SPDX-License-Identifier: Apache-2.0
"""A site that has jobs checked by default: what users submit with plain `sbatch`, and what changes.

Slurm, its submission plugin and the jobs are real; what a check measures is played."""

import difflib
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.node.rules.settings import Default
from slurm_health.preflight.by_default import installing
from tests.lab import Lab
from tests.lab.installed_site import COMMAND, DEADLINE_S, Site, check_by_default, install_default
from tests.lab.played_nodes import FAKE_WORKER, play

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

CONF = "/etc/slurm/slurm.conf"
RULES = """[default]
min_nodes = 2
min_time_min = 2
share = 0.05
limit_s = 900
opt_out = 'nocheck'
"""
SHELL = """#!/bin/bash
echo "args $# $1 $2"
srun --ntasks-per-node=1 hostname | sort
"""
PYTHON = """#!/usr/bin/env python3
import subprocess, sys
print("python", sys.argv[1:], flush=True)
subprocess.run(["srun", "--ntasks-per-node=1", "hostname"], check=True)
"""
# What a script can see of how it was started; its own process and place are others each time. Of
# its signals the shell tells itself: while it starts another program it blocks one for a moment.
SEES = """#!/bin/bash
tr '\\0' '\\n' </proc/$$/environ | sort
printf '<%s>\\n' "$@"; pwd; umask; ulimit -a; readlink /proc/$$/fd/[012]
while read -r line; do [[ $line == Sig* ]] && echo "$line"; done </proc/$$/status
echo to standard error >&2
exit 7
"""
DIFFERS = re.compile(r"^(SLURM_JOB_?ID|SLURM_TASK_PID|SLURM_HEALTH_PYTHON)=|SigQ:|slurm-\d+\.out")


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """A cluster of six nodes, on which jobs of two nodes and more are checked by default."""
    with Lab.start(nodes=6) as lab:
        site = Site(lab)
        check_by_default(site, RULES)
        yield site


@pytest.fixture
def by_default(site: Site) -> Iterator[Site]:
    """The site with nodes that are all well, and its installation as it was afterwards."""
    play(site)
    yield site
    play(site)


def sbatch(site: Site, *words: str, script: str = "", **variables: str) -> str:
    environ = {
        "SLURM_HEALTH_PYTHON": str(FAKE_WORKER),
        "FAKE_WORKER_DIR": site.directory("played"),
        **variables,
    }
    argv = ["sbatch", "--parsable", *words]
    done = site.lab.run(argv, user="alice", env=environ, stdin=script.encode())
    return done.stdout.strip()


def checks(site: Site, job: str) -> int:
    directory = site.lab.home("alice") / ".slurm-health" / "journal" / "lab" / job
    return len([*directory.glob("*/master.jsonl")])


@pytest.mark.heavy
def test_whatever_sbatch_is_given_is_checked_and_runs_as_it_is(by_default: Site) -> None:
    shell, python = by_default.script("job.sh", SHELL), by_default.script("job.py", PYTHON)
    wrap = "srun --ntasks-per-node=1 hostname"
    file = sbatch(by_default, "-N2", shell, "a b", "c")
    program = sbatch(by_default, "-N2", python, "a b")
    wrapped = sbatch(by_default, "-N2", f"--wrap={wrap}")
    stdin = sbatch(by_default, "-N2", script=SHELL)
    in_script = sbatch(by_default, script=SHELL.replace("\n", "\n#SBATCH -N 2\n", 1))
    array = sbatch(by_default, "-N2", "--array=1-2", "--output=task-%a.out", shell)
    jobs = [file, program, wrapped, stdin, in_script]
    for job in [*jobs, f"{array}_1", f"{array}_2"]:
        assert by_default.ended(job)["JobState"] == "COMPLETED"

    said = {job: by_default.read(f"slurm-{job}.out") for job in jobs}
    assert said[file].startswith("args 2 a b c\nn")
    assert said[program].startswith("python ['a b']\nn")
    assert re.fullmatch(r"(n\d\n){2}", said[wrapped])
    assert by_default.read("task-2.out").startswith("args 0")
    assert [checks(by_default, job) for job in jobs] == [1] * 5
    assert [checks(by_default, f"{array}_{task}") for task in (1, 2)] == [1, 1]
    assert by_default.report(file)["runs"][0]["script"]["exit_code"] == 0


def test_a_script_sees_and_leaves_what_it_would_without_a_check(by_default: Site) -> None:
    script = by_default.script("sees.sh", SEES)
    words = ("-N2", "-wn1,n2", script, "a b", "*")
    checked, plain = sbatch(by_default, *words), sbatch(by_default, "--comment=nocheck", *words)
    ended = [by_default.ended(job) for job in (checked, plain)]

    seen, expected = (
        [
            line
            for line in by_default.read(f"slurm-{job}.out").splitlines()
            if not DIFFERS.search(line)
        ]
        for job in (checked, plain)
    )
    assert not [*difflib.unified_diff(expected, seen, lineterm="")]
    assert [checks(by_default, job) for job in (checked, plain)] == [1, 0]
    assert {(job["JobState"], job["ExitCode"]) for job in ended} == {("FAILED", "7:0")}
    assert [job.get("Comment") for job in ended] == [None, "nocheck"]


def test_the_nodes_that_a_job_was_given_count_where_it_did_not_say(by_default: Site) -> None:
    few = sbatch(by_default, "-n2", "--wrap=echo ran")  # two CPUs of one node, or of two
    many = sbatch(by_default, "-n4", "--wrap=echo ran")
    for job in (few, many):
        by_default.ended(job)
        nodes = int(by_default.lab.job(job)["NumNodes"])
        assert checks(by_default, job) == (nodes >= 2)
        assert by_default.read(f"slurm-{job}.out") == "ran\n"


@pytest.fixture
def broken(by_default: Site) -> Iterator[Path]:
    """The file in which the rules are, to be broken; it is whole again afterwards."""
    check = by_default.lab.paths.etc / "slurm" / installing.CHECK
    yield check
    install_default(by_default)
    load_again(by_default)


# Each later than all before and than any file: tests and installations may share a second.
LATER_S = itertools.count(int(time.time()) + 3600)


def load_again(site: Site) -> None:
    """Have slurmctld read its Lua again, as it does for a file of a later second than before."""
    loader = site.lab.paths.etc / "slurm" / installing.LOADER
    os.utime(loader, times=(later_s := next(LATER_S), later_s))


@pytest.mark.parametrize("what", ["no interpreter", "no rules", "damaged rules", "failing rules"])
def test_a_broken_installation_costs_no_job(by_default: Site, broken: Path, what: str) -> None:
    before = len(by_default.controller_log())
    match what:
        case "no interpreter":
            text = installing.lua(Default(), python="/gone/bin/python", flags=["-P"], site="x")
            broken.write_text(text)
        case "no rules":
            broken.unlink()
        case "damaged rules":
            broken.write_text("return function(job) job.script = ")
        case "failing rules":
            broken.write_text("return function(job) error('as it happens') end")
    load_again(by_default)
    job = sbatch(by_default, "-N2", script=SHELL)

    assert by_default.ended(job)["JobState"] == "COMPLETED"
    assert re.fullmatch(r"args 0  \n(n\d\n){2}", by_default.read(f"slurm-{job}.out"))
    assert checks(by_default, job) == 0
    logged = by_default.controller_log()[before:]
    assert ("slurm-health" in logged) == (what != "no interpreter")


@pytest.mark.heavy
def test_it_is_taken_away_whole_and_slurmctld_starts_without_it(by_default: Site) -> None:
    remove = [COMMAND, "init", "default", "--remove"]
    directory = by_default.lab.paths.etc / "slurm"
    first = by_default.lab.run(remove, check=False)
    by_default.lab.restart_slurmctld()
    job = sbatch(by_default, "-N2", "--wrap=echo ran")
    kept = by_default.lab.run(["scontrol", "write", "batch_script", job, "-"]).stdout
    assert kept.endswith("\n\necho ran\n")
    assert by_default.ended(job)["JobState"] == "COMPLETED"
    by_default.lab.run(["sed", "-i", "/^JobSubmitPlugins/d", CONF])
    by_default.lab.run(["scontrol", "reconfigure"])
    second = by_default.lab.run(remove)
    try:
        assert (first.returncode, second.returncode) == (1, 0)
        assert "slurmctld would not start" in first.stderr
        assert {path.name for path in directory.iterdir()} == {"cgroup.conf", "slurm.conf"}
        by_default.lab.restart_slurmctld()
        job = sbatch(by_default, "-N2", "--wrap=echo ran")
        assert by_default.ended(job)["JobState"] == "COMPLETED"
    finally:
        check_by_default(by_default, RULES)


# --- programs that submit jobs themselves ---------------------------------------------------------


SLURMRESTD = shutil.which("slurmrestd") or shutil.which("slurmrestd", path="/usr/sbin")
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


def python(site: Site, text: str, *words: str) -> list[str]:
    """Run a program of alice's on the login node; its lines."""
    environ = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "SLURM_HEALTH_PYTHON": str(FAKE_WORKER),
        "FAKE_WORKER_DIR": site.directory("played"),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    argv = [sys.executable, site.script("program.py", text), *words]
    done = site.lab.run(argv, user="alice", env=environ, deadline_s=3 * DEADLINE_S)
    return done.stdout.split("\n")


@pytest.mark.skipif(not SLURMRESTD, reason="slurmrestd is not installed")
def test_a_job_that_a_program_asks_for_over_rest_is_checked(by_default: Site) -> None:
    (job, *_) = python(by_default, REST, str(SLURMRESTD))
    assert by_default.ended(job)["ExitCode"] == "3:0"
    (run,) = by_default.report(job)["runs"]
    assert {node["level"] for node in run["nodes"]} == {"healthy"}
    assert by_default.read("rest.out") == "rest 2\n" * 2
