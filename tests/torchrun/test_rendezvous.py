# SPDX-License-Identifier: Apache-2.0
"""Where node 0 is, and which node this is, as options and variables of other schedulers say it."""

from __future__ import annotations

import pytest

from slurm_health.records.errors import UsageError
from slurm_health.torchrun import rendezvous
from slurm_health.torchrun.rendezvous import Meeting, host_and_port, rank


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("a", "a", ""),
        ("a:1", "a", "1"),
        ("10.0.0.1:29500", "10.0.0.1", "29500"),
        ("::1", "::1", ""),
        ("[::1]", "::1", ""),
        ("[fd00::1]:29500", "fd00::1", "29500"),
        ("", "", ""),
    ],
)
def test_an_address_may_have_a_port(text: str, host: str, port: str) -> None:
    assert host_and_port(text) == (host, port)


# What is given, from last to first in the stated order; each replaces all before it.
ADDRESSES = [
    ({}, {"DLROVER_MASTER_ADDR": "dlrover:4"}, Meeting(host="dlrover", port=4)),
    ({}, {"MASTER_ADDR": "master:3"}, Meeting(host="master", port=3)),
    ({"master_addr": "pet:2"}, {}, Meeting(host="pet", port=2)),
    ({"rdzv_endpoint": "endpoint:1"}, {}, Meeting(host="endpoint", port=1)),
]


def test_the_first_address_in_the_stated_order_counts() -> None:
    given: dict[str, str] = {}
    environ: dict[str, str] = {}
    for options, variables, expected in ADDRESSES:
        given |= options
        environ |= variables
        assert rendezvous.meeting(given, environ, 9) == expected


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
    assert rendezvous.meeting(given, environ, 9) == Meeting(host="a", port=port)


def test_a_rendezvous_that_is_a_server_of_its_own_is_not_node_0() -> None:
    given = {"rdzv_backend": "etcd-v2", "rdzv_endpoint": "etcd:2379"}
    assert rendezvous.meeting(given, {"MASTER_ADDR": "a"}, 9) is None


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1", "9" * 5000])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(UsageError, match="the port of node 0"):
        rendezvous.meeting({}, {"MASTER_ADDR": "a", "MASTER_PORT": port}, 9)


def test_the_first_rank_in_the_stated_order_counts() -> None:
    environ = {"GROUP_RANK": "3"}
    assert rank({}, environ) == "3"
    environ["NODE_RANK"] = "2"
    assert rank({}, environ) == "2"
    assert rank({"node_rank": "1"}, environ) == "1"
    assert rank({}, {"RANK": "1"}) is None
