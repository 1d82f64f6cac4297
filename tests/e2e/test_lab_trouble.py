# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a check, the job ends right: nothing lost, left behind or done twice.

A job whose nodes cannot be checked says so, leaves a record, and does what was chosen.
"""

import json
import sys

import pytest

from tests.lab.installed_site import Site, accused, eventually, kinds, levels
from tests.lab.played_nodes import FAULTY, NEVER_READY, play, submit

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]


# --- jobs whose nodes cannot be checked -----------------------------------------------------------


NO_PYTHON = "--python=/no/such/python"
WHY = "UNCHECKED: --python: /no/such/python: no such executable on this node; correct that"


def comment(site: Site, job: int) -> str:
    argv = ["squeue", "-h", "--states=all", "-j", str(job), "-o", "%k"]
    return site.lab.run(argv).stdout.rstrip("\n")


def test_a_job_that_runs_unchecked_leaves_a_journal_and_asks_slurm_for_nothing(site: Site) -> None:
    site.forget_calls()
    job = site.submit("-N2", NO_PYTHON, "--comment=mine", "--wrap=echo ran")
    assert site.ended(job)["ExitCode"] == "0:0"
    calls = site.calls()
    output = site.lab.job_output(job)
    assert f"running the script anyway: {WHY}" in output
    assert "ran" in output.splitlines()
    assert kinds(site.records(job)) == {"run_started": 1, "unchecked": 1, "job_outcome": 1}
    (run,) = site.report(job)["runs"]
    assert run["unchecked"]["reason"].startswith("--python: /no/such/python")
    assert run["script"]["exit_code"] == 0
    assert WHY in site.table(job)
    assert comment(site, job) == "mine"
    assert not {name for name in calls if "UPDATE_JOB" in name}


@pytest.mark.parametrize(("choice", "state"), [("proceed", "COMPLETED"), ("stop", "FAILED")])
def test_where_slurm_health_is_not_installed_the_comment_says_so(
    site: Site, choice: str, state: str
) -> None:
    words = [f"--on-unchecked={choice}", "-N2", "--wrap=echo ran"]
    shown = site.health("sbatch", "--dry-run", *words)
    elsewhere = shown.stdout.replace(sys.executable, "/not/here/python")
    job = site.lab.sbatch(elsewhere, "--comment=mine", user="alice")
    assert site.lab.wait_job(job, {state}, 60)["JobState"] == state
    said = comment(site, job)
    assert "UNCHECKED: slurm-health cannot run on n1: " in said
    assert said.endswith(" | own comment: mine")
    assert ("ran" in site.lab.job_output(job).splitlines()) is (choice == "proceed")
    assert "UNCHECKED: slurm-health cannot run on n1" in site.health("report", str(job)).stderr


def test_a_signal_to_all_steps_does_not_disturb_the_check(site: Site) -> None:
    play(site, n2=NEVER_READY)
    job = submit(site, "-N2")
    for node in ("n1", "n2"):
        site.wait_record(job, "agent_started", writer=node)
    site.lab.run(["scancel", "--signal=USR1", str(job)], user="alice")
    play(site)  # n2 becomes ready
    assert site.ended(job)["ExitCode"] == "0:0"
    assert kinds(site.records(job))["agents_lost"] == 0
    assert "ran on n[1-2]" in site.lab.job_output(job)


@pytest.mark.slow
def test_ones_jobs_are_listed_with_what_slurm_says_of_them(site: Site) -> None:
    play(site, n3=FAULTY)
    moved = submit(site, "-N3", "--nodelist=n[1-2]", "--time=5", "--job-name=a name")
    site.ended(moved)
    array = submit(site, "-N1", "--array=1-2", "--time=5")
    waits = site.lab.sbatch("#!/bin/sh\n", "-N1", "--hold", user="alice")
    site.lab.wait_until(lambda: set(site.jobs()), lambda names: len(names) == 1, "one job left")

    document = json.loads(site.health("report", "--json").stdout)
    found = {job["job"]: job for job in document["jobs"]}

    assert found[str(moved)]["state"] == "completed"
    assert found[str(array)]["state"] == "2 completed"
    assert found[str(array)]["found"].startswith("2 tasks checked; ")
    assert found[str(waits)]["state"].startswith("pending (JobHeldUser)")
    assert next(iter(found)) == str(waits)
    text = site.health("report").stdout
    assert text.splitlines()[0].split()[:2] == ["JOB", "NAME"]
    site.lab.run(["scancel", str(waits)])


# --- another user lays a journal ready ------------------------------------------------------------


# Lays the next jobs' journals ready, and orders a round with a probe of its own in each that a
# check adopts. A check that trusts one of them runs that probe as its own user.
ATTACK = """
import os, pathlib, sys, time
from slurm_health.records.record_codec import encode
from slurm_health.records.records import ProbeUsed, Rendezvous, RoundStarted
root, first = pathlib.Path(sys.argv[1]), int(sys.argv[2])
os.umask(0)
payload, trap = root / "payload.py", root / "trap"
payload.write_text(
    "import pathlib\\n"
    "def measure(context):\\n"
    f"    pathlib.Path({str(root / 'stolen')!r}).write_text('run')\\n"
    "    return []\\n"
)
def lay(directory):
    directory.mkdir(parents=True)
    for writer in ("master", "n1", "n2"):
        (directory / f"{writer}.jsonl").touch()
lay(root / "lab" / str(first) / "0")
lay(trap / "0")
(root / "lab" / str(first + 1)).symlink_to(trap)
(root / "lab" / str(first + 2)).mkdir()
(root / "lab" / str(first + 2) / "0").symlink_to(trap / "0")
print("laid", flush=True)
order = RoundStarted(
    round=99, name="round 99",
    groups=[["n1"], ["n2"]], rendezvous=[Rendezvous(address="", port=1)] * 2,
    deadline_s=60, probes=[ProbeUsed(name="payload", scope="solo", path=str(payload))],
)
while True:
    for master in [*root.glob("lab/*/0/master.jsonl"), trap / "0" / "master.jsonl"]:
        if master.stat().st_size:
            with open(master, "ab") as file:
                file.write(encode(order, entry_id="master:99", time_s=time.time()))
    time.sleep(0.5)
"""


@pytest.mark.slow
@pytest.mark.torch
def test_a_directory_that_another_user_laid_ready_is_passed_by_and_nothing_in_it_is_run(
    site: Site,
) -> None:
    # What the administrator has made for everybody's journals, as doctor says.
    root = site.lab.paths.root / "journals"
    site.lab.run(["install", "-d", "-m", "1777", str(root), str(root / "lab")])
    first = site.lab.sbatch("#!/bin/sh\n", user="bob") + 1
    attack = site.lab.popen([sys.executable, "-c", ATTACK, str(root), str(first)], user="bob")
    try:
        trap = root / "lab" / str(first + 2) / "0"
        eventually(site, trap.is_symlink, "bob takes the places of three jobs to come")
        words = ("-N2", "-wn1,n2", f"--journal={root}", "--wrap", "echo the script ran")
        jobs = [site.submit(*words) for _ in range(3)]
        assert jobs == [first, first + 1, first + 2]
        for job in jobs:
            assert site.ended(job)["JobState"] == "COMPLETED"
    finally:
        attack.kill()
        attack.wait()
    for job in jobs:
        said = site.lab.job_output(job)
        assert "UNCHECKED" not in said
        assert said.endswith("the script ran\n")
        report = site.health("report", "--json", f"--journal={root}", str(job))
        (run,) = json.loads(report.stdout)["runs"]
        assert levels(run).keys() == {"n1", "n2"}
        assert accused(run) == {}
    assert not (root / "stolen").exists()
    assert {each.stat().st_size for each in (root / "trap" / "0").iterdir()} == {0}
