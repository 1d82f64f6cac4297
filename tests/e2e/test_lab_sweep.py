# SPDX-License-Identifier: Apache-2.0
"""A sweep of real Slurm finds the planted bad node, and history names it."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.e2e.lab_support import Site, eventually
from tests.e2e.played_nodes import FAKE_WORKER, FAULTY, STUCK, play
from tests.lab import Lab, missing
from tests.lab.commands import Result

pytestmark = pytest.mark.lab


def sweep(site: Site, *words: str) -> Result:
    played = {"FAKE_WORKER_DIR": site.directory("played", "alice")}
    return site.health(
        "sweep",
        "--partition=main",
        f"--python={FAKE_WORKER}",
        *words,
        env=played,
    )


def submitted(result: Result) -> list[int]:
    assert result.returncode == 0, result
    return [int(line.split()[0]) for line in result.stdout.splitlines()]


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


def test_a_dry_run_submits_nothing_and_says_what_it_would(site: Site) -> None:
    result = sweep(site, "--dry-run", "--every=1h", "--size=3", "--", "--qos=scavenger")

    for line in result.stdout.splitlines():
        words = shlex.split(line)
        assert words[0] == "sbatch"
        assert {"--exclusive", "--no-requeue", "--qos=scavenger", "--nodes=3"} <= set(words)
    assert site.jobs() == {}


def test_what_slurm_has_not_is_one_line(site: Site) -> None:
    result = site.health("sweep", "--partition=nowhere")

    assert result.returncode == 2
    assert result.stderr.startswith("slurm-health: Slurm has no partition 'nowhere'; it has ")


# --- giving way ----------------------------------------------------------------------------------

# As docs/admin/sweep.md has it: a partition over the same nodes that all others preempt.
GIVES_WAY = """\
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=scavenger Nodes=ALL PriorityTier=0 PreemptMode=CANCEL
"""


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
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
