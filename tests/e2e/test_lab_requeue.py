# SPDX-License-Identifier: Apache-2.0
"""A job that leaves a bad node: what it is told, what it keeps, and what comes between."""

import re
from typing import Any

import pytest

from slurm_health.preflight.acting.release_elsewhere import helper_name
from slurm_health.records.nodeset import expand
from tests.lab import played_nodes
from tests.lab.installed_site import (
    Gate,
    Site,
    accused,
    acts,
    eventually,
    kinds,
)
from tests.lab.played_nodes import FAULTY, RAN, UNREACHABLE, await_typist, play

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]

BAD = "n3"
USERS = ("alice", "root")


def submit(site: Site, *words: str, user: str = "alice", **options: Any) -> int:
    """Submit a job of four nodes, on one of which every check process is killed."""
    played_nodes.play(site, user, n3=FAULTY)
    return played_nodes.submit(site, "-N4", *words, user=user, **options)


def comment(site: Site, job: int) -> str:
    return site.lab.run(["squeue", "--noheader", f"--jobs={job}", "--format=%k"]).stdout.strip()


def await_held(site: Site, job: int) -> dict[str, str]:
    def held(record: dict[str, str]) -> bool:
        return (record["JobState"], record["Priority"]) == ("PENDING", "0")

    return site.lab.wait_until(lambda: site.lab.job(job), held, f"job {job} held", 120)


def helpers(site: Site, job: int, attempt: int = 0) -> list[str]:
    """The ids of the helper jobs of one attempt that have not ended."""
    name = helper_name(job, attempt)
    return site.lab.run(["squeue", "-ho", "%A", f"--name={name}"]).stdout.split()


def assert_ran_elsewhere(site: Site, job: int, user: str = "alice") -> None:
    record = site.ended(job)
    assert record["JobState"] == "COMPLETED", site.lab.job_output(job)
    assert record["Restarts"] == "1", site.lab.job_output(job)
    assert BAD in expand(record["ExcNodeList"])
    assert BAD not in expand(record["NodeList"])
    assert f"attempt 1 ran on {record['NodeList']}" in site.lab.job_output(job)
    assert "attempt 0 ran" not in site.lab.job_output(job)
    assert "ended the check" not in site.lab.job_output(job)  # the requeue's own SIGTERM
    site.assert_nothing_left()


# --- the comment ---------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_job_that_moved_has_its_own_comment_and_no_other(site: Site) -> None:
    own = 'mine: it\'s "so"; A=b'

    job = submit(site, f"--comment={own}", "--exclude=n2")

    assert_ran_elsewhere(site, job)
    said = [line for line in site.lab.job_output(job).splitlines() if "requeu" in line]
    assert len(said) == 1, said
    assert site.lab.run(["scontrol", "show", "job", str(job)]).stdout.count(f"Comment={own}") == 1
    assert site.lab.job(job)["ExcNodeList"] == "n[2-3]"


# --- the helper ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_helper_that_finds_no_place_leaves_a_held_job_and_lets_it_go_when_it_starts(
    site: Site,
) -> None:
    job = submit(site)
    site.wait_record(job, "run_started")
    # No job starts, as if every node is taken for ever; those that run go on.
    site.lab.run(["scontrol", "update", "PartitionName=main", "State=DOWN"])
    try:
        await_held(site, job)
        assert comment(site, job).startswith(f"slurm-health: requeued without {BAD} ")
        assert f"excnodelist={BAD} starttime=now; scontrol release {job}" in comment(site, job)
        assert len(helpers(site, job)) == 1
    finally:
        site.lab.run(["scontrol", "update", "PartitionName=main", "State=UP"])
    assert_ran_elsewhere(site, job)
    assert "slurm-health" not in site.lab.job(job).get("Comment", "")


@pytest.mark.heavy
def test_a_helper_that_is_killed_at_work_leaves_a_held_job_that_says_what_to_type(
    site: Site,
) -> None:
    gate = Gate(site, "scontrol", "StartTime=now")
    job = submit(site, env=gate.environ)
    gate.await_reached()
    site.lab.run(["scancel", "--signal=KILL", "--full", *helpers(site, job)])
    eventually(site, lambda: not helpers(site, job), "no helper left")
    gate.open()
    assert await_held(site, job)["ExcNodeList"] == BAD

    await_typist(site)
    found = re.search(r"(scontrol update jobid=.*?; scontrol release \w+)", comment(site, job))
    assert found, comment(site, job)
    site.lab.run(["sh", "-c", found[1]], user="alice")
    assert_ran_elsewhere(site, job)


# --- the check itself ----------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_master_that_is_killed_while_it_acts_does_nothing_twice(site: Site) -> None:
    gate = Gate(site, "scontrol", "update*NodeName*", "root")
    site.forget_calls()
    job = submit(site, user="root", env=gate.environ)
    gate.await_reached()
    site.kill_master()
    gate.open()
    assert_ran_elsewhere(site, job, "root")
    assert kinds(site.records(job, user="root"))["verdict_reached"] == 1
    calls = site.calls()
    assert calls["REQUEST_SUBMIT_BATCH_JOB"] == 2  # the job, and one helper
    assert calls["REQUEST_JOB_REQUEUE"] == calls["REQUEST_UPDATE_NODE"] == 1
    assert list(site.drained()) == [BAD]


# --- who drains the node ------------------------------------------------------------------------

LEFT = [
    ("action_intended", "exclude"),
    ("action_done", "exclude"),
    ("action_intended", "requeue"),
]
DRAINED = [("action_intended", "drain"), ("action_done", "drain")]


@pytest.mark.heavy
@pytest.mark.parametrize("user", USERS)
def test_root_drains_the_bad_node_with_our_reason_and_for_alice_no_drain_is_even_tried(
    site: Site, user: str
) -> None:
    violations = site.controller_log().count("Security violation")
    site.forget_calls()
    play(site, user, **{BAD: UNREACHABLE})
    job = played_nodes.submit(site, "-N4", user=user)
    assert_ran_elsewhere(site, job, user)

    bad, calls = site.lab.node_state(BAD), site.calls()
    assert acts(site.records(job, user=user)) == [*(DRAINED if user == "root" else []), *LEFT]
    table = site.table(job, user)
    if user == "root":
        assert "DRAIN" in bad["State"]
        assert bad["Reason"].startswith("shealth:")
        assert "allgather" in bad["Reason"]
        assert f" job={job} t=" in bad["Reason"]
        assert f"drained {BAD}" in table
    else:
        assert "Reason" not in bad
        assert "REQUEST_UPDATE_NODE" not in calls
        assert site.controller_log().count("Security violation") == violations
        assert f"requeued without {BAD}" in table
    assert f"attempt 2: moved away from {BAD}" in table
    first, second = site.report(job, user)["runs"]
    assert accused(first) == {BAD: "faulty"}
    assert accused(second) == {}
    assert (first["script"], second["script"]["exit_code"]) == (None, 0)


# --- a path between two nodes ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_path_that_is_cut_is_found_and_one_of_its_nodes_is_left(site: Site) -> None:
    site.lab.fault.cut_path("n3", "n4")
    job = site.submit("-N3", "--spares=1", "-x", "n[5-6]", "--wrap", RAN)
    record = site.ended(job)
    output = site.lab.job_output(job)
    assert record["JobState"] == "COMPLETED", output
    (run,) = site.report(job)["runs"]
    assert (accused(run), site.drained()) == ({}, {})
    assert "ran on n[1-3]" in output
    assert "the path to n3 fails" in output
