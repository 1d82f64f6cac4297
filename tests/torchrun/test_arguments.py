# SPDX-License-Identifier: Apache-2.0
"""What torchrun is told beside what the user wrote."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from slurm_health.records.errors import UsageError
from slurm_health.torchrun.arguments import (
    Arguments,
    NodeZeroAddress,
    Team,
    command_line,
    node_range,
    node_rank,
    node_zero_address,
    port,
    trains_alone,
)

FROM_SLURM = ["--nnodes=3", "--rdzv-backend=c10d", "--rdzv-id=7.0.1"]


def arguments(*options: str, checks: bool = False, **given: str) -> Arguments:
    return Arguments(
        options=list(options),
        program=["train.py", "--lr=1"],
        given=given,
        own={"network-check": True} if checks else {},
    )


def team(node: str = "n2", left_out: tuple[str, ...] = ()) -> Team:
    return Team(
        nodes=("n2", "n3", "n5"),
        node=node,
        host="n2",
        port=20007,
        rendezvous_id="7.0.1",
        left_out=left_out,
    )


def added(
    given: dict[str, str], environ: dict[str, str], *, node: str = "n3", checks: bool = False
) -> list[str]:
    """What comes between no options and the script."""
    members = team(node, left_out=("n1", "10.0.0.1") if checks else ())
    line = command_line(arguments(checks=checks, **given), members, environ)
    return line[:-2]


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        pytest.param(
            {},
            {},
            [*FROM_SLURM, "--rdzv-endpoint=n2:20007", "--rdzv-conf=is_host=0"],
            id="nothing given",
        ),
        pytest.param(
            {"nnodes": "2:3", "rdzv_id": "mine", "rdzv_conf": "timeout=9"},
            {},
            ["--rdzv-backend=c10d", "--rdzv-endpoint=n2:20007"],
            id="what is given stays",
        ),
        pytest.param(
            {"rdzv_endpoint": "n2:1", "rdzv_backend": "c10d"},
            {},
            ["--nnodes=3", "--rdzv-id=7.0.1"],
            id="a rendezvous of the user's",
        ),
        pytest.param(
            {},
            {"MASTER_ADDR": "n3", "MASTER_PORT": "5"},
            [*FROM_SLURM, "--rdzv-endpoint=n3:5"],
            id="the variables that scripts export",
        ),
        pytest.param(
            {"rdzv_backend": "static"},
            {},
            ["--nnodes=3", "--node-rank=1", "--master-addr=n2", "--master-port=20007"],
            id="static",
        ),
        pytest.param(
            {"master_addr": "n5"},
            {},
            ["--nnodes=3", "--node-rank=1", "--master-port=20007"],
            id="an option of the static rendezvous means that one",
        ),
        pytest.param(
            {"nnodes": "3", "node_rank": "2", "master_addr": "a", "master_port": "1"},
            {"MASTER_ADDR": "n3"},
            [],
            id="nothing left to say",
        ),
        pytest.param(
            {"rdzv_backend": "etcd-v2", "rdzv_endpoint": "etcd:2379"},
            {},
            ["--nnodes=3", "--rdzv-id=7.0.1"],
            id="a store elsewhere",
        ),
    ],
)
def test_what_is_not_given_is_filled_in(
    given: dict[str, str], environ: dict[str, str], expected: list[str]
) -> None:
    assert added(given, environ) == expected


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        pytest.param({"nnodes": "2:4"}, {}, "--nnodes=2:3", id="a range ends where the nodes do"),
        pytest.param({"nnodes": "3:4"}, {}, "--nnodes=3", id="a range that is used up is a number"),
        pytest.param({"nnodes": "2:4", "node_rank": "0"}, {}, "--nnodes=3", id="static has none"),
        pytest.param({"rdzv_endpoint": "n1:9"}, {}, "--rdzv-endpoint=n2:9", id="endpoint"),
        pytest.param({"rdzv_endpoint": "n1"}, {}, "--rdzv-endpoint=n2:20007", id="without port"),
        pytest.param({"rdzv_endpoint": "n1.site:9"}, {}, "--rdzv-endpoint=n2:9", id="long name"),
        pytest.param({"rdzv_endpoint": "10.0.0.1:9"}, {}, "--rdzv-endpoint=n2:9", id="address"),
        pytest.param({}, {"MASTER_ADDR": "n1"}, "--rdzv-endpoint=n2:20007", id="variable"),
        pytest.param({"node_rank": "2"}, {}, "--node-rank=1", id="ranks are dense"),
        pytest.param({"master_addr": "n1"}, {}, "--master-addr=n2", id="master address"),
    ],
)
def test_what_named_a_node_that_is_left_out_is_replaced(
    given: dict[str, str], environ: dict[str, str], expected: str
) -> None:
    assert expected in added(given, environ, checks=True)


def test_an_endpoint_on_no_node_of_the_job_is_left_alone() -> None:
    options = added({"rdzv_endpoint": "login:9"}, {}, checks=True)
    assert not any(option.startswith("--rdzv-endpoint") for option in options)


def test_a_range_is_waited_for_less_long_and_stays_where_others_may_come() -> None:
    assert "--rdzv-conf=is_host=1" in added({}, {}, node="n2")
    options = added({"nnodes": "2:4"}, {}, checks=True)
    assert "--nnodes=2:3" in options
    assert "--rdzv-conf=is_host=0,last_call_timeout=10" in options
    line = command_line(arguments(checks=True, nnodes="2:4"), replace(team(), open=True), {})
    assert "--nnodes=2:4" in line


@pytest.mark.parametrize(
    ("joinable", "nnodes", "expected"),
    [(False, "1:2", ["--nnodes=1"]), (True, "1:4", ["--nnodes=1:4", "--rdzv-endpoint=n2:20007"])],
)
def test_a_team_of_one_meets_itself_unless_others_may_come(
    joinable: bool, nnodes: str, expected: list[str]
) -> None:
    alone = replace(team(), nodes=("n2",), open=joinable)
    line = command_line(arguments(checks=True, nnodes=nnodes), alone, {})[:-2]
    assert set(expected) <= set(line)
    assert joinable or line == expected


def test_an_address_of_ipv6_is_bracketed() -> None:
    line = command_line(arguments(), replace(team(), host="fd00::1"), {})
    assert "--rdzv-endpoint=[fd00::1]:20007" in line


def test_options_of_the_user_come_first_and_the_script_last() -> None:
    line = command_line(arguments("--max_restarts=3"), team(), {})
    assert line[0] == "--max_restarts=3"
    assert line[-2:] == ["train.py", "--lr=1"]
    alone = command_line(arguments("--standalone"), None, {})
    assert alone == ["--standalone", "train.py", "--lr=1"]


@pytest.mark.parametrize(("text", "expected"), [("4", (4, 4)), ("3:4", (3, 4)), ("1:1", (1, 1))])
def test_node_counts_are_read(text: str, expected: tuple[int, int]) -> None:
    assert node_range(text) == expected


@pytest.mark.parametrize("text", ["", "four", "0", "4:3", "1:2:3", "-1", "1:"])
def test_other_node_counts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected N or MIN:MAX"):
        node_range(text)


@pytest.mark.parametrize(
    ("given", "standalone", "expected"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"nnodes": "1"}, False, True),
        ({"nnodes": "1:2"}, False, False),
    ],
)
def test_one_node_at_most_means_to_train_alone(
    given: dict[str, str], standalone: bool, expected: bool
) -> None:
    alone = Arguments(options=[], program=["x"], given=given, standalone=standalone)
    assert trains_alone(alone) is expected


def test_starts_that_can_meet_on_a_node_have_ports_of_their_own() -> None:
    starts = list(product(range(1000, 1032), range(6), range(12)))
    ports = {port(job_id=job, attempt=attempt, step=step) for job, attempt, step in starts}
    assert len(ports) == len(starts)
    assert min(ports) >= 20000
    # Linux gives away ports from 32768 on by itself.
    assert max(ports) < 32768


# What is given, from last to first in the stated order; each replaces all before it.
ADDRESSES = [
    ({}, {"DLROVER_MASTER_ADDR": "dlrover:4"}, NodeZeroAddress(host="dlrover", port=4)),
    ({}, {"MASTER_ADDR": "::1"}, NodeZeroAddress(host="::1", port=9)),
    ({}, {"MASTER_ADDR": "[fd00::1]:3"}, NodeZeroAddress(host="fd00::1", port=3)),
    ({"master_addr": "pet:2"}, {}, NodeZeroAddress(host="pet", port=2)),
    ({"rdzv_endpoint": "endpoint:1"}, {}, NodeZeroAddress(host="endpoint", port=1)),
]


def test_the_first_address_in_the_stated_order_counts() -> None:
    given: dict[str, str] = {}
    environ: dict[str, str] = {}
    for options, variables, expected in ADDRESSES:
        given |= options
        environ |= variables
        assert node_zero_address(given, environ, 9) == expected


@pytest.mark.parametrize(
    ("given", "environ", "port"),
    [
        ({"master_port": "1"}, {"MASTER_ADDR": "a:2", "MASTER_PORT": "3"}, 1),
        ({}, {"MASTER_ADDR": "a:2", "MASTER_PORT": "3"}, 2),
        ({}, {"MASTER_ADDR": "a", "MASTER_PORT": "3"}, 3),
        ({}, {"MASTER_ADDR": "a"}, 9),
    ],
)
def test_the_first_port_in_the_stated_order_counts(
    given: dict[str, str], environ: dict[str, str], port: int
) -> None:
    assert node_zero_address(given, environ, 9) == NodeZeroAddress(host="a", port=port)


def test_a_rendezvous_that_is_a_server_of_its_own_is_not_node_0() -> None:
    given = {"rdzv_backend": "etcd-v2", "rdzv_endpoint": "etcd:2379"}
    assert node_zero_address(given, {"MASTER_ADDR": "a"}, 9) is None


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1", "9" * 5000])
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
