# SPDX-License-Identifier: Apache-2.0
"""What is read from the topology Slurm prints."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.records.errors import LocalizeError
from slurm_health.system.slurm.parsing import parse_topology

TREE = """\
SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[1-8] Switches=leaf[1-2]
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-4]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[5-8]
"""


def test_only_the_lowest_switches_are_leaves() -> None:
    assert parse_topology(TREE) == {
        "leaf1": ("n1", "n2", "n3", "n4"),
        "leaf2": ("n5", "n6", "n7", "n8"),
    }


def test_a_configuration_file_is_read_as_well() -> None:
    text = "# fabric\nSwitchName=leaf1 Nodes=n[1-2] # rack 7\nSwitchName=top Switches=leaf1\n"
    assert parse_topology(text) == {"leaf1": ("n1", "n2")}


def test_blocks_are_leaves() -> None:
    text = "BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\nAggregatedBlock=b1 Nodes=n[1-2]\n"
    assert parse_topology(text) == {"b1": ("n1", "n2")}


def test_rings_are_leaves() -> None:
    text = "RingName=r1 Nodes=n[1-4] RingSize=4\nRingName=r2 Nodes=n[5-6] RingSize=2\n"
    assert parse_topology(text) == {"r1": ("n1", "n2", "n3", "n4"), "r2": ("n5", "n6")}


def test_a_switch_without_nodes_is_no_leaf() -> None:
    assert parse_topology("SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=(null)\n") == {}


@pytest.mark.parametrize("text", ["", "No topology information available\n", "\n\n"])
def test_a_cluster_without_a_topology_has_no_leaves(text: str) -> None:
    assert parse_topology(text) == {}


def test_a_node_list_that_cannot_be_read_is_named_with_its_line() -> None:
    with pytest.raises(LocalizeError, match="line 2"):
        parse_topology("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n[1-\n")


def test_a_node_on_two_leaves_is_refused() -> None:
    with pytest.raises(LocalizeError, match="node n1 hangs on b and on a"):
        parse_topology("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n")


@given(st.text())
def test_no_text_crashes_the_parser(text: str) -> None:
    with contextlib.suppress(LocalizeError):
        parse_topology(text)


@given(st.text(alphabet="SwitchName=odeLv01 []-,()\n#"))
def test_no_text_of_the_right_letters_crashes_it_either(text: str) -> None:
    with contextlib.suppress(LocalizeError):
        parse_topology(text)
