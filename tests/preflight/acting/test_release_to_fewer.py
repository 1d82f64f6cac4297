# SPDX-License-Identifier: Apache-2.0
"""A job that makes do with fewer nodes, released for those that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preflight.acting.test_requeue_helper import HELPER, JOB, Scene


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize(
    ("least", "drained", "asked"),
    [
        (1, [], None),  # n1 and n3 are as many as it asks for
        (1, ["n3"], "1-2"),
        (2, ["n3"], None),
        (None, ["n3"], None),
    ],
)
def test_a_job_that_makes_do_with_fewer_nodes_asks_for_those_there_are(
    scene: Scene, least: int | None, drained: list[str], asked: str | None
) -> None:
    scene.slurm.set(partition_nodes="n[1-3]")
    scene.slurm.change_job(JOB, size=[2, 8, 4])
    for node in drained:
        scene.slurm.change_node(node, state="IDLE+DRAIN", reason="disk")
    scene.client.requeue_held(JOB)

    assert scene.release("n2", least=least)

    job = scene.slurm.job(JOB)
    changed = [job.get(key) for key in ("NumNodes", "NumTasks", "NumCPUs")]
    assert changed == ([asked, "2", "4"] if asked else [None] * 3)
    said = ", with a node count of 1, as no more nodes are available" if asked else ""
    assert scene.recorded() == (True, f"without n2{said}")


def test_a_job_that_was_made_smaller_while_it_ran_asks_for_the_tasks_of_the_nodes_it_has(
    scene: Scene,
) -> None:
    scene.slurm.set(partition_nodes="n[1-4]")
    scene.slurm.change_job(JOB, size=[3, 8, 4], tasks_per_node=1)
    scene.client.requeue_held(JOB)

    assert scene.release("n2", least=3)

    job = scene.slurm.job(JOB)
    assert [job.get(key) for key in ("NumNodes", "NumTasks", "NumCPUs")] == ["3", "3", "6"]


@pytest.mark.parametrize(
    ("busy", "state", "keep_size", "asked"),
    [
        ({"n1": [HELPER], "n3": []}, "IDLE", False, None),  # the helper is gone in a moment
        ({"n1": [HELPER, 14], "n3": []}, "IDLE", False, "1-2"),
        ({"n1": [HELPER], "n3": []}, "IDLE+RESERVED", False, "1-2"),
        ({"n1": [HELPER], "n3": []}, "IDLE+PLANNED", False, "1-2"),
        ({"n1": [HELPER], "n3": [14]}, "IDLE", False, "1-2"),
        ({"n1": [HELPER], "n3": [14]}, "IDLE", True, None),
    ],
)
def test_a_job_that_makes_do_with_fewer_nodes_does_not_wait_for_those_that_others_use(
    scene: Scene, busy: dict[str, list[int]], state: str, keep_size: bool, asked: str | None
) -> None:
    scene.slurm.set(partition_nodes="n[1-3]")
    scene.slurm.change_job(JOB, size=[2, 8, 4])
    for node, jobs in busy.items():
        scene.slurm.change_node(node, state=state if not jobs else "MIXED")
        for job in jobs:
            known = scene.slurm.jobs().get(str(job), {"nodes": []})["nodes"]
            scene.slurm.run_job(job, [*known, node])
    scene.client.requeue_held(JOB)

    assert scene.release("n2", least=1, keep_size=keep_size)

    assert scene.slurm.job(JOB).get("NumNodes") == asked


def test_a_job_that_slurm_does_not_make_smaller_is_released_all_the_same(scene: Scene) -> None:
    scene.slurm.set(partition_nodes="n[1-2]", refuse={"NumNodes=1-2": "Access denied"})
    scene.client.requeue_held(JOB)

    assert scene.release("n2", least=1)

    assert scene.recorded() == (True, "without n2, with its node count, which could not be reduced")


@pytest.mark.parametrize(("reservation", "asked"), [("mine", None), ("", "1-2")])
def test_reserved_nodes_are_free_for_a_job_of_a_reservation(
    scene: Scene, reservation: str, asked: str | None
) -> None:
    scene.slurm.set(partition_nodes="n[1-3]", reservations={"mine": "n[1-3]"})
    scene.slurm.change_job(JOB, size=[2, 8, 4], Reservation=reservation)
    for node in ("n1", "n3"):
        scene.slurm.change_node(node, state="IDLE+RESERVED")
    scene.client.requeue_held(JOB)

    assert scene.release("n2", least=1)

    assert scene.slurm.job(JOB).get("NumNodes") == asked
