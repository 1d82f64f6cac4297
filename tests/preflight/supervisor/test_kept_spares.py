# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from slurm_health.preflight.supervisor.kept_spares import resized_environ

FIVE_NODES = {
    "SLURM_JOB_NODELIST": "n[1-5]",
    "SLURM_NODELIST": "n[1-5]",
    "SLURM_NNODES": "5",
    "SLURM_JOB_NUM_NODES": "5",
    "SLURM_JOB_CPUS_PER_NODE": "2(x4),8",
    "SLURM_TASKS_PER_NODE": "2(x5)",
    "SLURM_NTASKS": "10",
    "SLURM_NPROCS": "10",
    "HOME": "/home/alice",
}


def test_counts_and_lists_are_those_of_the_nodes_that_are_kept() -> None:
    assert resized_environ(FIVE_NODES, ("n1", "n3", "n5")) == {
        "SLURM_JOB_NODELIST": "n[1,3,5]",
        "SLURM_NODELIST": "n[1,3,5]",
        "SLURM_NNODES": "3",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_CPUS_PER_NODE": "2(x2),8",
        "SLURM_TASKS_PER_NODE": "2(x3)",
        "SLURM_NTASKS": "6",
        "SLURM_NPROCS": "6",
    }


def test_variables_the_job_does_not_have_are_not_invented() -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NNODES": "4", "SLURM_TASKS_PER_NODE": "1(x4)"}
    assert resized_environ(environ, ("n1", "n2")) == {
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_TASKS_PER_NODE": "1(x2)",
    }


def test_a_count_per_node_that_cannot_be_read_is_left_alone() -> None:
    environ = {**FIVE_NODES, "SLURM_TASKS_PER_NODE": "many"}
    assert "SLURM_TASKS_PER_NODE" not in resized_environ(environ, ("n1",))
    assert "SLURM_NTASKS" not in resized_environ(environ, ("n1",))


@pytest.mark.parametrize(
    ("nodelist", "keep", "left"),
    [
        ("r1n4,r2n[1-4]", ("r1n4", "r2n1", "r2n2", "r2n3"), "r1n4,r2n[1-3]"),
        (
            "r1n[1-4],r2n[1-4]",
            ("r1n1", "r1n2", "r1n4", "r2n1", "r2n2", "r2n3", "r2n4"),
            "r1n[1-2,4],r2n[1-4]",
        ),
        ("b[1-2],a[1-2]", ("a1", "b1"), "b1,a1"),
    ],
)
def test_nodes_that_are_kept_stay_in_the_order_of_the_job(
    nodelist: str, keep: tuple[str, ...], left: str
) -> None:
    environ = {"SLURM_JOB_NODELIST": nodelist}
    assert resized_environ(environ, keep) == {"SLURM_JOB_NODELIST": left}


def test_counts_are_those_of_the_nodes_beside_which_slurm_writes_them() -> None:
    environ = {
        "SLURM_JOB_NODELIST": "rack1-node[1-2],rack2-node1,rack10-node1",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2),16,32",
    }
    assert resized_environ(environ, ("rack1-node1", "rack10-node1")) == {
        "SLURM_JOB_NODELIST": "rack1-node1,rack10-node1",
        "SLURM_JOB_CPUS_PER_NODE": "8,32",
    }
