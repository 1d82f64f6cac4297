# SPDX-License-Identifier: Apache-2.0
"""A job with a bad node leaves it and runs elsewhere; with the rights to, it drains the node."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.lab.installed_site import Gate, Record, Report, Site, acts, levels
from tests.lab.played_nodes import UNREACHABLE, play, submit

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]

TRAIN = """#!/bin/bash
echo "attempt $SLURM_RESTART_COUNT on $SLURM_JOB_NODELIST" >> ran
srun sh -c 'uname -n' | sort | xargs >> ran
"""
BAD = "n3"
NODES = 4
REQUEUE = [
    ("action_intended", "exclude"),
    ("action_done", "exclude"),
    ("action_intended", "requeue"),
]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One job that met a bad node, after its end."""

    site: Site
    user: str
    job: dict[str, str]
    report: Report
    records: list[Record]
    bad: dict[str, str]
    drained: dict[str, str]
    calls: dict[str, int]
    table: str
    ran: list[list[str]]


def run_with_bad_node(site: Site, user: str) -> Seen:
    """Let a user's job meet a node that its partners do not reach."""
    script = site.script("train.sh", TRAIN, user)
    play(site, user, **{BAD: UNREACHABLE})
    site.forget_calls()
    number = submit(site, "-N4", script, user=user, script="")
    job = site.ended(number)
    calls = dict(site.calls())
    site.assert_nothing_left()
    seen = Seen(
        site=site,
        user=user,
        job=job,
        report=site.report(number, user),
        records=site.records(number, user=user),
        bad=site.lab.node_state(BAD),
        drained=site.drained(),
        calls=calls,
        table=site.table(number, user),
        ran=[line.split() for line in site.read("ran", user).splitlines()],
    )
    site.lab.reset()
    return seen


def assert_ran_elsewhere(seen: Seen) -> None:
    """The second attempt, and it alone, ran the script, on as many other nodes, to its end."""
    assert seen.job["JobState"] == "COMPLETED"
    assert seen.job["Restarts"] == "1"
    assert seen.job["ExcNodeList"] == BAD
    (attempt, nodes) = seen.ran
    assert attempt == ["attempt", "1", "on", seen.job["NodeList"]]
    assert len(nodes) == NODES
    assert BAD not in nodes


@pytest.fixture(scope="module")
def as_root(module_site: Site) -> Seen:
    return run_with_bad_node(module_site, "root")


@pytest.fixture(scope="module")
def as_alice(module_site: Site) -> Seen:
    return run_with_bad_node(module_site, "alice")


@pytest.mark.heavy
def test_root_drains_the_bad_node_with_our_reason_and_the_job_runs_elsewhere(as_root: Seen) -> None:
    assert_ran_elsewhere(as_root)
    assert as_root.drained.keys() == {BAD}
    assert "DRAIN" in as_root.bad["State"]
    assert as_root.bad["Reason"].startswith("shealth:")
    assert f" job={as_root.job['JobId']} t=" in as_root.bad["Reason"]
    assert "allgather" in as_root.bad["Reason"]
    drained_once = [("action_intended", "drain"), ("action_done", "drain")]
    assert acts(as_root.records) == [*drained_once, *REQUEUE]
    assert f"attempt 2: moved away from {BAD}" in as_root.table
    assert f"drained {BAD}" in as_root.table


@pytest.mark.heavy
def test_alice_gets_the_same_job_and_no_drain_is_even_tried(as_alice: Seen) -> None:
    assert_ran_elsewhere(as_alice)
    assert acts(as_alice.records) == REQUEUE
    assert as_alice.drained == {}
    assert "Reason" not in as_alice.bad
    assert "REQUEST_UPDATE_NODE" not in as_alice.calls
    assert as_alice.calls["REQUEST_UPDATE_JOB"] > 0
    assert "Security violation" not in as_alice.site.controller_log()
    first, second = as_alice.report["runs"]
    assert levels(first) == {**dict.fromkeys(("n1", "n2", "n4"), "healthy"), BAD: "faulty"}
    assert set(levels(second).values()) == {"healthy"}
    assert (first["script"], second["script"]["exit_code"]) == (None, 0)
    assert f"requeued without {BAD}" in as_alice.table


@pytest.mark.slow
@pytest.mark.parametrize("when", ["show?nodes", "show?node?-o"], ids=["before", "meanwhile"])
def test_an_administrators_note_on_a_bad_node_is_left_as_it_is(site: Site, when: str) -> None:
    script = site.script("train.sh", TRAIN, "root")
    site.lab.run(["rm", "-f", "ran"])
    play(site, "root", **{BAD: UNREACHABLE})
    gate = Gate(site, "scontrol", when, "root")
    number = submit(site, "-N4", script, user="root", script="", env=gate.environ)
    gate.await_reached()
    note = "memory, see ticket 42"
    site.lab.run(["scontrol", "update", f"NodeName={BAD}", "State=DRAIN", f"Reason={note}"])
    gate.open()
    job = site.ended(number)
    assert site.drained()[BAD].startswith(f"{note} [")
    assert job["JobState"] == "COMPLETED"
    assert job["Restarts"] == "1"
    records = site.records(number, user="root")
    tried = [("action_intended", "drain"), ("action_done", "drain")]
    assert acts(records) == [*tried, *REQUEUE]
    (left,) = [r for r in records if r["kind"] == "action_done" and r["action"] == "drain"]
    assert not left["succeeded"]
    assert note in left["detail"]
