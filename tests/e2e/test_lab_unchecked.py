# SPDX-License-Identifier: Apache-2.0
"""A job whose nodes cannot be checked: it says so, leaves a record, and does what was chosen."""

from __future__ import annotations

import json
import sys

import pytest

from slurm_health.report.export import schema
from tests.lab.installed_site import Gate, Site, kinds
from tests.lab.played_nodes import FAULTY, NEVER_READY, play, submit

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]

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


@pytest.mark.heavy
def test_a_check_that_dies_each_time_is_recorded_in_its_journal(site: Site) -> None:
    gate = Gate(site, "srun", "")
    job = site.submit("-N2", "--wrap=echo ran", env=gate.environ)
    for run in ("0", "0-2"):
        site.wait_record(job, "run_started", run)
        site.kill_master()
    assert site.ended(job)["ExitCode"] == "0:0"
    found = site.records(job, "0-2")[-2:]
    assert [each["kind"] for each in found] == ["unchecked", "job_outcome"]
    assert "killed by SIGKILL" in found[0]["reason"]
    assert "running the script anyway: UNCHECKED: the check was st" in site.lab.job_output(job)
    assert "UNCHECKED: the check was started 2 times" in " ".join(site.table(job).split())


# --- signals that meet the check ----------------------------------------------------------------


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


# --- the report -----------------------------------------------------------------------------------


def listed(site: Site, user: str = "alice") -> dict[str, dict[str, object]]:
    """Return what `slurm-health report` alone says, by job."""
    import jsonschema  # here, as it takes seconds to load: not in each worker that only collects

    done = site.health("report", "--json", user=user)
    assert done.returncode == 0, done
    found = json.loads(done.stdout)
    jsonschema.Draft202012Validator(schema()).validate(found)
    return {job["job"]: job for job in found["jobs"]}


@pytest.mark.slow
def test_ones_jobs_are_listed_with_what_slurm_says_of_them(site: Site) -> None:
    play(site, n3=FAULTY)
    moved = submit(site, "-N3", "--nodelist=n[1-2]", "--time=5", "--job-name=a name")
    site.ended(moved)
    array = submit(site, "-N1", "--array=1-2", "--time=5")
    waits = site.lab.sbatch("#!/bin/sh\n", "-N1", "--hold", user="alice")
    site.lab.wait_until(lambda: set(site.jobs()), lambda names: len(names) == 1, "one job left")

    found = listed(site)

    assert found[str(moved)]["state"] == "completed"
    assert found[str(array)]["state"] == "2 completed"
    assert str(found[str(array)]["found"]).startswith("2 tasks checked; ")
    assert str(found[str(waits)]["state"]).startswith("pending (JobHeldUser)")
    assert next(iter(found)) == str(waits)
    text = site.health("report").stdout
    assert text.splitlines()[0].split()[:2] == ["JOB", "NAME"]
    site.lab.run(["scancel", str(waits)])


def test_what_became_of_the_jobs_nodes_since_is_told(site: Site) -> None:
    play(site)
    job = submit(site, "-N2", "--nodelist=n[1-2]", "--time=5")
    site.ended(job)
    note = "shealth: gpu 3 lost"
    site.lab.run(["scontrol", "update", "nodename=n2,n5", "state=drain", f"reason={note}"])

    last = site.table(job).split("\n\n")[-1]

    assert last.splitlines()[1].split()[0] == "n2"
    assert f"{note} [root@" in last
    assert "n5" not in last
