# SPDX-License-Identifier: Apache-2.0
"""What a user chose for slow nodes, for doubt and for the limit on requeues, as Slurm sees it."""

from __future__ import annotations

import pytest

from slurm_health.records.nodeset import expand
from tests.lab.installed_site import Site, acts
from tests.lab.played_nodes import (
    INCONCLUSIVE,
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


@pytest.mark.slow
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


@pytest.mark.slow
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
