# SPDX-License-Identifier: Apache-2.0
"""A sweep of real Slurm finds the planted bad node, and history names it."""

from __future__ import annotations

import json
import shlex

import pytest

from tests.e2e.lab_support import Site, eventually
from tests.e2e.played_nodes import FAKE_WORKER, FAULTY, play
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
