# SPDX-License-Identifier: Apache-2.0
"""The srun that holds a check's agents is killed: the check goes on, and no agent stays."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from slurm_health.preflight.master.master import SILENCE_S
from slurm_health.system.slurm.command import OWN_STEPS
from tests.lab.installed_site import Site, accused, eventually, kinds
from tests.lab.played_nodes import FAKE_WORKER, NEVER_READY, STUCK, command, play, submit

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),
]


def kill(pids: list[int]) -> None:
    """Kill (SIGKILL) processes, of which some may end because others have."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def sruns(site: Site) -> list[int]:
    """The srun of the agents, first, and the process that it leaves to clean up after it."""
    return sorted(site.processes_with(f"--job-name={OWN_STEPS}step"))


def agents(site: Site) -> list[int]:
    """Agents and workers, on all nodes."""
    return [*site.processes_with("agent"), *site.processes_with(str(FAKE_WORKER))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "count"),
    [(NEVER_READY, 1), (STUCK, 2)],
    ids=["srun while agents start", "srun and its helper in a round"],
)
def test_a_check_whose_srun_is_killed_starts_its_agents_again_and_accuses_nobody(
    site: Site, how: str, count: int
) -> None:
    play(site, **dict.fromkeys(("n1", "n2", "n3", "n4"), how))
    job = submit(site, "-N4", "-wn1,n2,n3,n4")
    site.wait_record(job, "round_started" if how == STUCK else "agents_launched")
    eventually(site, lambda: len(agents(site)) >= 8, "four agents with a worker each")
    kill(sruns(site)[:count])
    site.wait_record(job, "agents_lost")
    play(site)
    ended = site.ended(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0")
    assert "attempt ran on n[1-4]" in site.lab.job_output(job)
    (run,) = site.report(job)["runs"]
    assert accused(run) == {}
    records = site.records(job)
    assert kinds(records)["agents_launched"] == 2
    (lost,) = [each["reason"] for each in records if each["kind"] == "agents_lost"]
    assert "srun ended with killed by SIGKILL" in lost
    assert site.drained() == {}
    site.assert_nothing_left()


@pytest.mark.slow
def test_agents_that_lost_their_master_and_their_srun_leave_within_the_silence_limit(
    site: Site,
) -> None:
    """The job goes on, so that Slurm has no reason to end them."""
    nodes = ("n1", "n2", "n3", "n4")
    play(site, **dict.fromkeys(nodes, STUCK))
    job = site.lab.sbatch(
        f"#!/bin/sh\n{command(site)} &\nsleep 600\n", "-N4", f"-w{','.join(nodes)}"
    )
    site.wait_record(job, "round_started")
    eventually(site, lambda: len(agents(site)) >= 8, "four agents with a worker each")
    kill([*site.processes_with("check"), *sruns(site)])
    eventually(site, lambda: not agents(site), "no agent and no worker", SILENCE_S + 30)
    assert site.lab.job(job)["JobState"] == "RUNNING"
