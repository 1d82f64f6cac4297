# SPDX-License-Identifier: Apache-2.0
"""Where a process of `slurm-health run` finds itself, from the variables it was given."""

import re
from typing import Any, Literal

import msgspec
import pytest
from msgspec.structs import replace

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
PLAIN = Arguments(options=[], program=["x"], given={})


def with_given(*, checks: bool = False, **given: str) -> Arguments:
    return Arguments(
        options=[], program=["x"], given=given, own={"network_check": True} if checks else {}
    )


def place_of(arguments: Arguments, environ: dict[str, str]) -> TaskPlace:
    place = find(arguments, environ)
    assert place is not None
    return place


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """Where a process runs, what it is given, and its place, no place, or why it is refused."""

    of: Literal["batch", "step", ""]
    environ: dict[str, str] = {}
    given: dict[str, str] = {}
    checks: bool = False
    standalone: bool = False
    place: dict[str, Any] = {}
    refused: str = ""


@rows
def test_a_process_finds_its_place_or_is_told_why_it_has_none(case: Case) -> None:
    environ = {"batch": BATCH, "step": STEP, "": {}}[case.of] | case.environ
    arguments = with_given(checks=case.checks, **case.given)
    arguments = replace(arguments, standalone=case.standalone)
    if case.refused:
        with pytest.raises((UsageError, AllocationError), match=re.escape(case.refused)):
            find(arguments, environ)
        return
    found = find(arguments, environ)

    place = {"leads": found.leads, **msgspec.to_builtins(found)} if found else {}
    place |= {"nodes": list(place.get("nodes", ()))}
    assert {name: place[name] for name in case.place} == case.place
    assert bool(found) is bool(case.place)


@rows
def test_all_tasks_of_a_start_have_a_name_and_a_port_that_no_other_start_has(
    other: dict[str, str], same: bool
) -> None:
    one, another = place_of(PLAIN, STEP), place_of(PLAIN, {**STEP, **other})
    assert (one.start == another.start, one.port == another.port) == (same, same)


def test_a_job_id_that_is_given_out_again_names_another_start() -> None:
    again = {**STEP, "SLURM_SRUN_COMM_PORT": "61117"}
    assert place_of(PLAIN, STEP).start != place_of(PLAIN, again).start


def test_all_nodes_compute_the_port_that_is_not_given() -> None:
    given = with_given(nnodes="2", checks=True, rdzv_id="a7")
    places = [place_of(given, {"NODE_RANK": rank, "MASTER_ADDR": "a"}) for rank in "01"]
    assert places[0].meeting == NodeZeroAddress(host="a", port=places[1].port)


@pytest.mark.parametrize(
    ("nodes", "host"), [(("node0", "node2"), "n0"), (("node1", "node2"), "10.0.0.2")]
)
def test_the_start_after_a_failure_meets_where_the_first_node_that_trains_leads_it(
    nodes: tuple[str, ...], host: str
) -> None:
    given = with_given(checks=True, nnodes="2:3")
    addresses = {"node0": "10.0.0.1", "node1": "10.0.0.2"}
    third, second = (
        place_of(given, {"NODE_RANK": rank, "MASTER_ADDR": "n0"}) for rank in ("2", "1")
    )
    later = place_among(third, nodes, addresses, "again")

    assert later.nodes == nodes
    assert later.meeting is not None
    assert later.meeting.host == host
    if nodes[0] == second.node:  # it leads in the place of node 0, and gives the start a name
        led = [place_among(second, nodes, addresses, "again") for _ in range(2)]
        assert all(each.leads for each in led)
        assert len({second.start, *(each.start for each in led)}) == 3
