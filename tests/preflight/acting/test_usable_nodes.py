# SPDX-License-Identifier: Apache-2.0
"""On which nodes a job may run: those of its partition that have what it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.preflight.acting.usable_nodes import Usable, usable_nodes
from slurm_health.preflight.decide.policy import Policy
from slurm_health.records.verdict import Level
from slurm_health.system.slurm.client import Client
from tests.preflight.acting.test_perform import Scene as Check
from tests.preflight.acting.test_requeue_helper import JOB
from tests.preflight.acting.test_requeue_helper import Scene as Release
from tests.support.fake_slurm import FakeSlurm

PARTITION = frozenset({"n1", "n2", "n3", "n4"})


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    """Return a cluster of four nodes and a job on two, all of different features."""
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.set(partition_nodes="n[1-4]", reservations={"mine": ["n[1-3]", "SPEC_NODES"]})
    slurm.run_job(JOB, ["n1", "n2"])
    for node, features in {"n1": "h100,ib", "n2": "ib,h100", "n3": "h100", "n4": "ib"}.items():
        slurm.change_node(node, features=features)
    return slurm


def found(slurm: FakeSlurm, **changes: object) -> Usable:
    slurm.change_job(JOB, **changes)
    client = Client(slurm.environ())
    return usable_nodes(client.job(JOB), client.partitions(), client)


@pytest.mark.parametrize(
    ("constraint", "nodes"),
    [
        ("(null)", PARTITION),
        ("h100", {"n1", "n2", "n3"}),
        ("h100&ib", {"n1", "n2"}),
        ("ib,h100", {"n1", "n2"}),
        ("h100|ib", PARTITION),
        ("[h100|ib]", PARTITION),
        ("h100*2&ib*2", PARTITION),
        ("(h100&ib)|a100", PARTITION),
        ("a100", PARTITION),  # it runs where that is not: what is shown is not what rules
    ],
)
def test_a_job_may_run_on_the_nodes_that_have_all_features_it_asks_for(
    slurm: FakeSlurm, constraint: str, nodes: set[str]
) -> None:
    narrowed = (f"--constraint={constraint}",) if nodes != PARTITION else ()

    assert found(slurm, Features=constraint) == Usable(frozenset(nodes), PARTITION, narrowed)


@pytest.mark.parametrize(
    ("name", "flags", "nodes"),
    [
        ("mine", "SPEC_NODES", {"n1", "n2", "n3"}),
        ("mine", "IGNORE_JOBS,SPEC_NODES", {"n1", "n2", "n3"}),
        ("mine", "STATIC", {"n1", "n2", "n3"}),
        ("mine", "", PARTITION),  # Slurm chose them, and puts others in their place
        ("mine", "SPEC_NODES,REPLACE_DOWN", PARTITION),
        ("mine", "SPEC_NODES,FLEX", PARTITION),
        ("gone", "SPEC_NODES", PARTITION),
    ],
)
def test_a_job_may_run_on_the_nodes_of_its_reservation_if_these_stay_the_same(
    slurm: FakeSlurm, name: str, flags: str, nodes: set[str]
) -> None:
    slurm.set(reservations={"mine": ["n[1-3]", flags], "other": ["n4", "SPEC_NODES"]})

    usable = found(slurm, Reservation=name)

    assert usable.nodes == nodes
    assert usable.narrowed_by == (("--reservation=mine",) if nodes != PARTITION else ())


def test_what_slurm_does_not_tell_rules_no_node_out(slurm: FakeSlurm) -> None:
    both = {"Features": "ib", "Reservation": "mine"}
    narrowed = ("--constraint=ib", "--reservation=mine")
    assert found(slurm, **both) == Usable(frozenset({"n1", "n2"}), PARTITION, narrowed)

    slurm.set(refuse={"node": "Socket timed out"})
    assert found(slurm, **both).narrowed_by == ("--reservation=mine",)
    slurm.set(refuse={"node": "Socket timed out", "reservation": "Access denied"})
    assert found(slurm, **both) == Usable(PARTITION, PARTITION)


@pytest.mark.parametrize("changes", [{"Features": "h100"}, {"Reservation": "mine"}])
def test_a_faulty_node_does_not_have_a_job_wait_for_nodes_that_it_may_not_use(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    check = Check(tmp_path)
    check.slurm.set(reservations={"mine": ["n[1-3]", "SPEC_NODES"]}, partition_nodes="n[1-4]")
    for node in ("n1", "n2", "n3"):
        check.slurm.change_node(node, features="h100")
    assert check.act(n3=Level.FAULTY).disposition == "requeue"

    check.slurm.change_job(JOB, state="RUNNING", nodes=["n1", "n2", "n3"], **changes)
    finished = check.act(n3=Level.FAULTY)

    assert finished.disposition == "stop"
    option = f"--{'constraint=h100' if 'Features' in changes else 'reservation=mine'}"
    assert f"partition main has 2 nodes for {option} without n3" in finished.reason
    assert "the job needs 3: ask for fewer" in finished.reason
    assert "(--nodes=2)" in finished.reason
    fewer = Policy(nodes_wanted=3, nodes_needed=2)  # but it cannot give its batch node back
    assert check.act(policy=fewer, n1=Level.FAULTY, n3=Level.HEALTHY).disposition == "requeue"


@pytest.mark.parametrize("changes", [{"Features": "h100"}, {"Reservation": "mine"}])
def test_a_requeued_job_asks_for_those_free_nodes_only_that_it_may_use(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    release = Release(tmp_path)
    release.slurm.set(partition_nodes="n[1-4]", reservations={"mine": ["n[1-2]", "SPEC_NODES"]})
    for node in ("n1", "n2"):
        release.slurm.change_node(node, features="h100")
    release.slurm.change_job(JOB, size=[2, 8, 4], **changes)
    release.client.requeue_held(JOB)

    assert release.release("n2", least=1)

    assert release.slurm.job(JOB)["NumNodes"] == "1-2"
