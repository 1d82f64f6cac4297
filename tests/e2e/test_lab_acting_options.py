# SPDX-License-Identifier: Apache-2.0
"""What a user chose for slow nodes, for doubt and for the limit on requeues, as Slurm sees it."""

from __future__ import annotations

import pytest

from slurm_health.records.nodeset import expand
from tests.lab.installed_site import Site, acts
from tests.lab.played_nodes import (
    FAKE_WORKER,
    FAULTY,
    INCONCLUSIVE,
    RAN,
    SLOW,
    UNREACHABLE,
    play,
    release,
    submit,
)

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),
]

HELD = ("PENDING", "0")


def await_held(site: Site, job: int) -> str:
    """Wait until the job is held; its comment."""

    def look() -> tuple[str, str]:
        record = site.lab.job(job)
        return record["JobState"], record["Priority"]

    site.lab.wait_until(look, lambda seen: seen == HELD, f"job {job} held", 150)
    return site.lab.run(["squeue", "--noheader", f"--jobs={job}", "--format=%k"]).stdout.strip()


def restarts(site: Site, job: int) -> tuple[str, str, str]:
    """Wait for the job's end: its state, how often it was requeued, where it ran."""
    record = site.ended(job)
    return record["JobState"], record["Restarts"], record["NodeList"]


def assert_ran_without_n3(site: Site, job: int) -> None:
    """The job was requeued once, and ran on four other nodes."""
    state, requeues, nodes = restarts(site, job)
    assert (state, requeues) == ("COMPLETED", "1")
    assert len(expand(nodes)) == 4
    assert "n3" not in expand(nodes)


# --- slow nodes ----------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_slow_node_is_left_for_a_smaller_job_by_default(site: Site) -> None:
    play(site, n3=SLOW)
    job = submit(site, "-N4", "--min-nodes=3")
    assert restarts(site, job) == ("COMPLETED", "0", "n[1-2,4]")


@pytest.mark.heavy
def test_a_job_that_keeps_its_size_is_requeued_from_a_slow_node(site: Site) -> None:
    play(site, n3=SLOW)
    job = submit(site, "-N4", "--min-nodes=3", "--on-straggler=requeue")
    assert_ran_without_n3(site, job)
    assert site.drained() == {}


def test_a_slow_node_is_only_reported_where_the_script_says_so(site: Site) -> None:
    play(site, n3=SLOW)
    script = site.script("train.sh", f"#!/bin/sh\n#HEALTH --on-straggler=report\n{RAN}\n")
    environ = {"FAKE_WORKER_DIR": site.directory("played")}
    job = site.submit("-N4", f"--python={FAKE_WORKER}", script, env=environ)
    assert restarts(site, job) == ("COMPLETED", "0", "n[1-4]")
    assert "n3 slow, reported only" in site.lab.job_output(job)


@pytest.mark.heavy
@pytest.mark.parametrize(("user", "drained"), [("root", {"n3"}), ("alice", set())])
def test_a_slow_node_is_drained_on_request_by_those_who_may(
    site: Site, user: str, drained: set[str]
) -> None:
    play(site, user, n3=SLOW)
    job = submit(site, "-N4", "--on-straggler=drain", user=user)
    assert_ran_without_n3(site, job)
    assert site.drained().keys() == drained
    assert all(f" job={job} t=" in note for note in site.drained().values())


# --- doubt ---------------------------------------------------------------------------------------


def test_a_job_proceeds_on_undecided_nodes_and_says_so(site: Site) -> None:
    play(site, n3=INCONCLUSIVE)
    job = submit(site, "-N4")
    assert restarts(site, job) == ("COMPLETED", "0", "n[1-4]")
    assert "n3 undecided, continuing anyway" in site.lab.job_output(job)


@pytest.mark.heavy
def test_a_job_of_two_nodes_that_cannot_exchange_data_gets_another_partner(site: Site) -> None:
    play(site, n2=UNREACHABLE)
    job = submit(site, "-N2", "--nodelist=n1", "--exclude=n[3-4]")
    state, requeues, nodes = restarts(site, job)
    assert (state, requeues, set(expand(nodes)) & {"n1", "n2"}) == ("COMPLETED", "1", {"n1"})
    assert site.drained() == {}
    told = site.table(job)
    assert "n2 cannot exchange data with n1, which can with other nodes: it is the" in told
    assert "tell your administrators about n2" in told


@pytest.mark.heavy
def test_where_the_node_that_stayed_is_the_bad_one_the_next_partner_shows_it(site: Site) -> None:
    play(site, n1=UNREACHABLE)
    job = submit(site, "-N2", "--exclude=n[5-6]")
    state, requeues, nodes = restarts(site, job)
    # Once, where n1 is not free again as soon as the job is: Slurm then takes two others.
    assert (state, requeues) in {("COMPLETED", "1"), ("COMPLETED", "2")}
    assert "n1" not in expand(nodes)
    assert site.drained() == {}


def test_two_nodes_that_cannot_exchange_data_stay_where_no_other_is_free(site: Site) -> None:
    play(site, n2=UNREACHABLE)
    job = submit(site, "-N2", "--nodelist=n[1-2]")
    assert restarts(site, job) == ("COMPLETED", "0", "n[1-2]")
    assert "a job on both may hang" in site.lab.job_output(job)


@pytest.mark.heavy
def test_an_undecided_node_is_left_and_not_drained_where_the_user_asks_for_it(site: Site) -> None:
    play(site, "root", n3=INCONCLUSIVE)
    job = submit(site, "-N4", user="root", env={"SLURM_HEALTH_ON_INCONCLUSIVE": "requeue"})
    assert_ran_without_n3(site, job)
    assert site.lab.job(job)["ExcNodeList"] == "n3"
    assert site.drained() == {}


@pytest.mark.heavy
def test_a_job_waits_for_a_person_whose_release_is_the_answer(site: Site) -> None:
    play(site, n3=INCONCLUSIVE)
    job = submit(site, "-N4", "--on-inconclusive=hold")
    comment = await_held(site, job)
    assert comment.startswith("slurm-health: held (n3: ")
    assert f"excnodelist=n3 starttime=now; scontrol release {job}" in comment
    assert "ran on" not in site.lab.job_output(job)
    assert acts(site.records(job)) == [("action_intended", "hold")]
    assert "held the job" in site.table(job)
    release(site, job)
    assert restarts(site, job) == ("COMPLETED", "1", "n[1-4]")
    assert "attempt 1 ran on n[1-4]" in site.lab.job_output(job)
    site.assert_nothing_left()


def test_a_spare_takes_the_place_of_an_undecided_node_and_nobody_has_to_look(site: Site) -> None:
    play(site, n3=INCONCLUSIVE)
    job = submit(site, "-N4", "--spares=1", "--on-inconclusive=hold")
    assert restarts(site, job) == ("COMPLETED", "0", "n[1-2,4-5]")


def test_a_job_that_may_not_be_requeued_cannot_be_held_and_does_not_run_in_doubt(
    site: Site,
) -> None:
    play(site, n3=INCONCLUSIVE)
    job = submit(site, "-N4", "--no-requeue", "--on-inconclusive=hold")
    record = site.ended(job)
    assert (record["JobState"], record["ExitCode"]) == ("FAILED", "3:0")
    assert "cannot be held" in site.lab.job_output(job)
    assert "attempt" not in site.lab.job_output(job)


# --- a job that was moved often enough -----------------------------------------------------------


def test_a_job_at_its_limit_starts_on_the_bad_node_where_the_user_says_so(site: Site) -> None:
    play(site, n3=FAULTY)
    job = submit(site, "-N4", "--max-requeues=0", "--at-requeue-limit=start")
    assert restarts(site, job) == ("COMPLETED", "0", "n[1-4]")
    assert "starting anyway (--at-requeue-limit=start)" in site.lab.job_output(job)


@pytest.mark.heavy
def test_a_job_at_its_limit_waits_for_a_person_where_the_user_says_so(site: Site) -> None:
    play(site, n3=FAULTY)
    job = submit(site, "-N4", "--max-requeues=0", "--at-requeue-limit=hold")
    assert "--max-requeues" in await_held(site, job)
    play(site)
    release(site, job)
    assert restarts(site, job)[:2] == ("COMPLETED", "1")
    assert expand(site.lab.job(job)["NodeList"])
