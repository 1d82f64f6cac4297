# SPDX-License-Identifier: Apache-2.0
"""A sweep of real Slurm finds the planted bad node, and history names it."""

from __future__ import annotations

import json

import pytest

from tests.lab import Lab
from tests.lab.commands import Result
from tests.lab.installed_site import Site, eventually
from tests.lab.played_nodes import FAKE_WORKER, FAULTY, STUCK, play, submit

pytestmark = pytest.mark.lab


def sweep(site: Site, *words: str, user: str = "alice") -> Result:
    played = {"FAKE_WORKER_DIR": site.directory("played", user)}
    return site.health(
        "sweep",
        "--partition=main",
        f"--python={FAKE_WORKER}",
        *words,
        user=user,
        env=played,
    )


def submitted(result: Result, code: int = 0) -> list[int]:
    assert result.returncode == code, result
    return [int(line.split()[0]) for line in result.stdout.splitlines()]


@pytest.mark.heavy
def test_a_sweep_checks_every_node_in_turns_and_the_history_names_the_bad_one(site: Site) -> None:
    bad = site.lab.nodes[4]
    play(site, **{bad: FAULTY})
    turns = 0
    while jobs := submitted(sweep(site)):
        turns += 1
        assert len(jobs) == 1  # three of six nodes at one time
        assert submitted(sweep(site)) == []  # while they are in a check there is no room
        site.ended(jobs[0])
        eventually(site, lambda: not site.jobs(), "the end of a check")
        assert turns < 6

    history = json.loads(site.health("history", ",".join(site.lab.nodes), "--json").stdout)
    found = {each["node"]: each["checks"][-1]["level"] for each in history["nodes"]}
    assert found == {node: "faulty" if node == bad else "healthy" for node in site.lab.nodes}
    assert turns == 2


# --- giving way ----------------------------------------------------------------------------------

# As docs/admin/fleet.md has it: a partition over the same nodes that all others preempt.
GIVES_WAY = """\
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=scavenger Nodes=ALL PriorityTier=0 PreemptMode=CANCEL
"""


@pytest.mark.slow
def test_a_sweep_gives_way_to_a_job_and_goes_on_where_it_stopped() -> None:
    with Lab.start(nodes=6, slurm_conf_extra=GIVES_WAY) as lab:
        site = Site(lab)
        play(site, **dict.fromkeys(lab.nodes, STUCK))  # its check takes as long as it is let
        (swept,) = submitted(sweep(site, "--", "--partition=scavenger"))
        site.wait_record(swept, "round_started")
        job = lab.sbatch("#!/bin/sh\nexec hostname", f"-N{len(lab.nodes)}", user="bob")

        assert lab.wait_job(swept, {"PREEMPTED", "CANCELLED"}, 90)["JobState"] == "PREEMPTED"
        assert site.ended(job)["JobState"] == "COMPLETED"
        site.assert_nothing_left()
        bad = lab.nodes[1]
        play(site, **{bad: FAULTY})
        while jobs := submitted(sweep(site, "--", "--partition=scavenger")):
            site.ended(jobs[0])
            eventually(site, lambda: not site.jobs(), "the end of a check")

        history = json.loads(site.health("history", ",".join(lab.nodes), "--json").stdout)
        found = {each["node"]: each["checks"][-1]["level"] for each in history["nodes"]}
        assert found == {node: "faulty" if node == bad else "healthy" for node in lab.nodes}
        (cluster,) = json.loads(site.health("lemons", "--json").stdout)["clusters"]
        assert cluster["nodes"][0]["node"] == bad
        assert site.drained() == {}


# --- what may be removed -------------------------------------------------------------------------


@pytest.mark.heavy
def test_clean_spares_the_journal_of_a_job_that_runs(site: Site) -> None:
    play(site)
    ended, running = submit(site, "--nodes=3"), submit(site, "--nodes=2", script="sleep 600")
    site.ended(ended)
    eventually(
        site,
        lambda: "running for" in site.health("report", str(running)).stdout,
        "the script of a job that runs",
    )

    cleaned = site.health("clean", "--older-than=0h", "--yes")

    assert cleaned.returncode == 0, cleaned
    assert f"its job has not ended: job {running}" in cleaned.stderr
    assert site.health("report", str(running)).returncode == 0
    assert site.health("report", str(ended)).returncode == 4
