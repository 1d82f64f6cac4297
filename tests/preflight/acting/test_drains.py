# SPDX-License-Identifier: Apache-2.0
"""The drains that a job itself asks for, on a cluster that refuses what Slurm refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.node.rules import drain_note
from slurm_health.node.rules.settings import Breaker
from slurm_health.node.shared import read_ledger
from slurm_health.preflight.decide.policy import Policy
from slurm_health.records.records import (
    ActionDone,
)
from slurm_health.records.verdict import Level
from tests.preflight.acting.test_perform import JOB, Scene
from tests.support.sites import write_site


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_drain_that_slurm_accepts_and_loses_is_recorded_as_failed(scene: Scene) -> None:
    scene.slurm.set(admin=True, drain_is_lost=["n3"])

    finished = scene.act(uid=0, n3=Level.FAULTY)

    assert finished.disposition == "requeue"
    done = next(r for r in scene.records if isinstance(r, ActionDone))
    assert (done.succeeded, done.nodes) == (False, ["n3"])
    assert "the node is still in the pool" in done.detail
    assert read_ledger(Breaker(directory=str(scene.shared))).entries == ()


@pytest.mark.parametrize(("state", "note"), [("IDLE", "watch the fan"), ("IDLE+DRAIN", "ADMIN")])
def test_anothers_note_stays_whether_the_node_is_in_the_pool_or_not(
    scene: Scene, state: str, note: str
) -> None:
    scene.slurm.set(admin=True)
    scene.slurm.change_node("n3", state=state, reason=note)

    assert scene.act(uid=0, n3=Level.FAULTY).disposition == "requeue"

    assert scene.slurm.node("n3") == {"state": state, "reason": note}
    assert ("done", "drain", False) in scene.told()


def test_a_jobs_drain_has_a_hooks_note_and_counts_where_hooks_count(scene: Scene) -> None:
    scene.slurm.set(admin=True)

    scene.act(uid=0, n3=Level.FAULTY)

    note = drain_note.parse(scene.slurm.node("n3")["reason"])
    assert note is not None
    assert (note.checks, note.job, note.text) == (("network",), JOB, "network: no allgather")
    (entry,) = read_ledger(Breaker(directory=str(scene.shared))).entries
    assert (entry.node, entry.job, entry.uid, entry.hook) == ("n3", JOB, 0, "check")


def test_a_job_costs_no_more_nodes_than_the_cap_for_every_job(scene: Scene) -> None:
    scene.slurm.set(admin=True)
    breaker = f"directory='{scene.shared}'\nshare=1.0"
    write_site(scene.site_file.parent, f"[breaker]\n{breaker}\n")

    policy = Policy(max_bad_share=1.0)
    scene.act(uid=0, policy=policy, n2=Level.FAULTY, n3=Level.FAULTY, n4=Level.FAULTY)

    drained = [name for name in ("n2", "n3", "n4") if "DRAIN" in scene.slurm.node(name)["state"]]
    assert len(drained) == 2
    assert ("done", "drain", False) in scene.told()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[hooks]\ndrain=false\n", "hooks.drain is false"),
        ("", "breaker.directory is not set"),
        ("nonsense", "the site's rules for drains cannot be read"),
    ],
)
def test_where_hooks_may_not_drain_a_job_may_not_either(scene: Scene, text: str, said: str) -> None:
    scene.slurm.set(admin=True)
    write_site(scene.site_file.parent, text)

    assert scene.act(uid=0, n3=Level.FAULTY).disposition == "requeue"

    assert scene.slurm.node("n3")["state"] == "IDLE"
    assert any(isinstance(r, ActionDone) and said in r.detail for r in scene.records)
