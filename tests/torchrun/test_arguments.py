# SPDX-License-Identifier: Apache-2.0
"""What torchrun is told beside what the user wrote."""

from itertools import product
from typing import Any

import pytest

from slurm_health.records.errors import UsageError
from slurm_health.torchrun.arguments import (
    Arguments,
    NodeZeroAddress,
    node_rank,
    node_zero_address,
)
from slurm_health.torchrun.place import TaskPlace, torchrun_line
from tests.support.rows import rows


def arguments(*options: str, **given: str) -> Arguments:
    return Arguments(options=list(options), program=["train.py", "--lr=1"], given=given)


EVERYONE = ("n1", "n2", "n3", "n5")
ADDRESSES = {"n1": "10.0.0.1"}
AT = NodeZeroAddress(host="fd00::1", port=29500)


def line(given: Arguments, environ: dict[str, str], **differing: Any) -> list[str]:
    """torchrun's arguments on one of three nodes, of which the first does not train."""
    known = {"nodes": EVERYONE[1:], "node": "n3", "start": "7.0.1", "job_id": 7}
    ours = differing.pop("ours", True)
    place = TaskPlace(**{**known, **differing})
    everyone = EVERYONE if ours else place.nodes
    return torchrun_line(given, place, everyone, ADDRESSES, environ, ours=ours)


def added(
    given: dict[str, str], environ: dict[str, str], *, node: str = "n3", ours: bool = False
) -> list[str]:
    """What comes between no options and the script."""
    return line(arguments(**given), environ, node=node, ours=ours)[:-2]


@rows
def test_what_is_not_given_is_filled_in(
    given: dict[str, str], environ: dict[str, str], expected: list[str]
) -> None:
    assert added(given, environ) == expected


@rows
def test_what_named_a_node_that_is_left_out_is_replaced(
    given: dict[str, str], environ: dict[str, str], expected: str
) -> None:
    assert expected in added(given, environ, ours=True)


def test_an_endpoint_on_no_node_of_the_job_is_left_alone() -> None:
    options = added({"rdzv_endpoint": "login:9"}, {}, ours=True)
    assert not any(option.startswith("--rdzv-endpoint") for option in options)


def test_a_range_is_waited_for_less_long_and_stays_where_others_may_come() -> None:
    assert "--rdzv-conf=is_host=1" in added({}, {}, node="n2")
    options = added({"nnodes": "2:4"}, {}, ours=True)
    assert "--nnodes=2:3" in options
    assert "--rdzv-conf=is_host=0,last_call_timeout=10" in options
    options = line(arguments(nnodes="2:4"), {}, meeting=AT)
    assert {"--nnodes=2:4", "--rdzv-id=none", "--rdzv-endpoint=[fd00::1]:29500"} <= set(options)


def test_options_of_the_user_come_first_and_the_script_last() -> None:
    options = line(arguments("--max_restarts=3"), {})
    assert options[0] == "--max_restarts=3"
    assert options[-2:] == ["train.py", "--lr=1"]
    alone = torchrun_line(arguments("--standalone"), None, (), {}, {}, ours=False)
    assert alone == ["--standalone", "train.py", "--lr=1"]


def test_workers_that_we_start_again_are_not_started_again_by_torchrun() -> None:
    given = arguments("--max-restarts=3", max_restarts="3")
    ours, torchruns = (torchrun_line(given, None, (), {}, {}, ours=ours) for ours in (True, False))
    assert ours[:2] == ["--max-restarts=3", "--max-restarts=0"]
    assert "--max-restarts=0" not in torchruns


@rows
def test_node_counts_are_read(text: str, expected: tuple[int, int]) -> None:
    nnodes = arguments(nnodes=text).nnodes
    assert nnodes is not None
    assert (nnodes.least, nnodes.most) == expected


@pytest.mark.parametrize("text", ["four", "0", "4:3", "1:2:3", "-1", "1:"])
def test_other_node_counts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected N or MIN:MAX"):
        arguments(nnodes=text).nnodes  # noqa: B018 - it raises


@rows
def test_one_node_at_most_means_to_train_alone(
    given: dict[str, str], standalone: bool, expected: bool
) -> None:
    alone = Arguments(options=[], program=["x"], given=given, standalone=standalone)
    assert alone.trains_alone is expected


def test_starts_that_can_meet_on_a_node_have_ports_of_their_own() -> None:
    starts = list(product(range(1000, 1032), range(6), range(12)))
    ports = {
        TaskPlace(nodes=(), node="", start="", job_id=job, attempt=attempt, step=step).port
        for job, attempt, step in starts
    }
    assert len(ports) == len(starts)
    assert min(ports) >= 20000
    # Linux gives away ports from 32768 on by itself.
    assert max(ports) < 32768


# What is given, from last to first in the stated order; each replaces all before it.
STATED = [
    ({}, {"DLROVER_MASTER_ADDR": "dlrover:4"}, NodeZeroAddress(host="dlrover", port=4)),
    ({}, {"MASTER_ADDR": "::1"}, NodeZeroAddress(host="::1", port=9)),
    ({}, {"MASTER_ADDR": "[fd00::1]:3"}, NodeZeroAddress(host="fd00::1", port=3)),
    ({"master_addr": "pet:2"}, {}, NodeZeroAddress(host="pet", port=2)),
    ({"rdzv_endpoint": "endpoint:1"}, {}, NodeZeroAddress(host="endpoint", port=1)),
]


def test_the_first_address_in_the_stated_order_counts() -> None:
    given: dict[str, str] = {}
    environ: dict[str, str] = {}
    for options, variables, expected in STATED:
        given |= options
        environ |= variables
        assert node_zero_address(given, environ, 9) == expected


@rows
def test_the_first_port_in_the_stated_order_counts(
    given: dict[str, str], environ: dict[str, str], port: int
) -> None:
    assert node_zero_address(given, environ, 9) == NodeZeroAddress(host="a", port=port)


def test_the_processes_of_a_start_meet_at_the_port_beside_that_of_the_training() -> None:
    assert NodeZeroAddress(host="a", port=29500).beside.port == 29501
    assert NodeZeroAddress(host="a", port=65535).beside.port == 65534


@rows
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(UsageError, match="the port of node 0"):
        node_zero_address({}, {"MASTER_ADDR": "a", "MASTER_PORT": port}, 9)


def test_the_first_rank_in_the_stated_order_counts() -> None:
    environ = {"GROUP_RANK": "3"}
    assert node_rank({}, environ) == "3"
    environ["NODE_RANK"] = "2"
    assert node_rank({}, environ) == "2"
    assert node_rank({"node_rank": "1"}, environ) == "1"
    assert node_rank({}, {"RANK": "1"}) is None
