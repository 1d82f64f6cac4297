# SPDX-License-Identifier: Apache-2.0
"""Where a process of `slurm-health run` finds itself, from the variables it was given."""

from __future__ import annotations

import pytest

from slurm_health.records.errors import AllocationError, UsageError
from slurm_health.torchrun.arguments import Arguments, NodeZeroAddress
from slurm_health.torchrun.place import TaskPlace, find, place_among
from tests.support.rows import rows

# As Slurm 22.05 set them, less what is not looked at: batch script, and task 1 of a step of three.
BATCH = {
    "SLURMD_NODENAME": "n1",
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_PARTITION": "main",
    "SLURM_NODEID": "0",
}
STEP = {
    **BATCH,
    "SLURMD_NODENAME": "n3",
    "SLURM_NODEID": "1",
    "SLURM_SRUN_COMM_PORT": "61116",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[2-4]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
}
CHECKED = Arguments(options=[], program=["x"], given={}, own={"network_check": True})
PLAIN = Arguments(options=[], program=["x"], given={})


def with_given(*, checks: bool = False, **given: str) -> Arguments:
    return Arguments(
        options=[], program=["x"], given=given, own={"network_check": True} if checks else {}
    )


def place_of(arguments: Arguments, environ: dict[str, str]) -> TaskPlace:
    place = find(arguments, environ)
    assert place is not None
    return place


def test_a_task_of_a_step_stands_among_the_nodes_of_the_step() -> None:
    place = place_of(CHECKED, STEP)
    assert place.nodes == ("n2", "n3", "n4")
    assert place.node == "n3"
    assert not place.leads
    assert place_of(CHECKED, {**STEP, "SLURMD_NODENAME": "n2"}).leads
    assert (place.job_id, place.attempt, place.step) == (12, 0, 0)


@rows
def test_all_tasks_of_a_start_have_a_name_and_a_port_that_no_other_start_has(
    other: dict[str, str], same: bool
) -> None:
    one, another = place_of(PLAIN, STEP), place_of(PLAIN, {**STEP, **other})
    assert (one.start == another.start, one.port == another.port) == (same, same)


def test_a_job_id_that_is_given_out_again_names_another_start() -> None:
    again = {**STEP, "SLURM_SRUN_COMM_PORT": "61117"}
    assert place_of(PLAIN, STEP).start != place_of(PLAIN, again).start


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_a_batch_script_of_several_nodes_is_told_to_use_srun(step: str | None) -> None:
    environ = BATCH if step is None else {**BATCH, "SLURM_STEP_ID": step}
    with pytest.raises(UsageError, match="srun --ntasks-per-node=1"):
        find(PLAIN, environ)


@pytest.mark.parametrize("environ", [BATCH, {**BATCH, "SLURM_JOB_NODELIST": "n1"}, {}])
def test_who_trains_alone_needs_no_place(environ: dict[str, str]) -> None:
    assert find(with_given(nnodes="1"), environ) is None
    alone = Arguments(options=[], program=["x"], given={}, standalone=True)
    assert find(alone, environ) is None


def test_several_tasks_on_a_node_are_refused_unless_each_trains_alone() -> None:
    environ = {**STEP, "SLURM_STEP_NUM_TASKS": "6"}
    with pytest.raises(UsageError, match="one task per node is enough"):
        find(PLAIN, environ)
    assert find(with_given(nnodes="1"), environ) is None


@pytest.mark.parametrize("nodelist", ["", "n[1", "n[5-6]"])
def test_a_node_list_that_cannot_be_is_refused(nodelist: str) -> None:
    with pytest.raises(AllocationError, match="SLURM_STEP_NODELIST"):
        find(PLAIN, {**STEP, "SLURM_STEP_NODELIST": nodelist})


def test_outside_slurm_the_variables_of_other_schedulers_tell() -> None:
    environ = {"NODE_RANK": "1", "MASTER_ADDR": "a"}
    place = place_of(with_given(nnodes="2:3", rdzv_id="a7", checks=True), environ)
    assert place.nodes == ("node0", "node1", "node2")
    assert place.node == "node1"
    assert place.start == "a7"
    assert place.meeting is not None


BOTH = {"NODE_RANK": "1", "MASTER_ADDR": "a"}


def test_outside_slurm_a_single_machine_has_no_place() -> None:
    assert find(CHECKED, {}) is None
    assert find(with_given(nnodes="2"), {}) is None


@rows
def test_outside_slurm_it_is_said_what_is_missing(
    arguments: Arguments, environ: dict[str, str], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        find(arguments, environ)


def test_nodes_meet_where_their_check_can_be_reached_and_compute_a_port_that_is_not_given() -> None:
    environ = {"GROUP_RANK": "1", "DLROVER_MASTER_ADDR": "a:29500"}
    place = place_of(with_given(nnodes="2", checks=True), environ)
    assert (place.node, place.meeting) == ("node1", NodeZeroAddress(host="a", port=29500))
    given = with_given(nnodes="2", checks=True, rdzv_id="a7")
    places = [place_of(given, {"NODE_RANK": rank, "MASTER_ADDR": "a"}) for rank in "01"]
    assert places[0].meeting == NodeZeroAddress(host="a", port=places[1].port)
    # A rendezvous that is a server of its own is not node 0.
    given = with_given(nnodes="2", rdzv_backend="etcd-v2", rdzv_endpoint="etcd:2379")
    assert find(given, BOTH) is None


@pytest.mark.parametrize(
    ("nodes", "host"), [(("node0", "node2"), "n0"), (("node1", "node2"), "10.0.0.2")]
)
def test_the_start_after_a_failure_meets_where_the_first_node_that_trains_leads_it(
    nodes: tuple[str, ...], host: str
) -> None:
    given = with_given(checks=True, nnodes="2:3")
    place = place_of(given, {"NODE_RANK": "2", "MASTER_ADDR": "n0"})
    later = place_among(place, nodes, {"node0": "10.0.0.1", "node1": "10.0.0.2"}, "again")

    assert later.nodes == nodes
    assert later.meeting is not None
    assert later.meeting.host == host


def test_who_leads_that_start_in_the_place_of_node_0_gives_it_a_name_of_its_own() -> None:
    given = with_given(checks=True, nnodes="2:3")
    place = place_of(given, {"NODE_RANK": "1", "MASTER_ADDR": "n0"})
    nodes = ("node1", "node2")

    later = [place_among(place, nodes, {"node1": "10.0.0.2"}, "again") for _ in range(2)]
    assert all(each.leads for each in later)
    assert len({place.start, *(each.start for each in later)}) == 3
