# SPDX-License-Identifier: Apache-2.0
"""What is read from the topology Slurm prints."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.records.errors import LocalizeError
from slurm_health.records.nodeset import expand
from slurm_health.system.slurm.parsing import parse_topology

TREE = """\
SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[1-8] Switches=leaf[1-2]
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-4]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[5-8]
"""
FILE = "# fabric\nSwitchName=leaf1 Nodes=n[1-2] # rack 7\nSwitchName=top Switches=leaf1\n"
BLOCKS = "BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\nAggregatedBlock=b1 Nodes=n[1-2]\n"
RINGS = "RingName=r1 Nodes=n[1-4] RingSize=4\nRingName=r2 Nodes=n[5-6] RingSize=2\n"


@pytest.mark.parametrize(
    ("text", "leaves"),
    [
        pytest.param(TREE, {"leaf1": "n[1-4]", "leaf2": "n[5-8]"}, id="the lowest switches"),
        pytest.param(FILE, {"leaf1": "n[1-2]"}, id="a configuration file"),
        pytest.param(BLOCKS, {"b1": "n[1-2]"}, id="blocks"),
        pytest.param(RINGS, {"r1": "n[1-4]", "r2": "n[5-6]"}, id="rings"),
        pytest.param("SwitchName=leaf1 Level=0 Nodes=(null)\n", {}, id="a switch without nodes"),
        pytest.param("No topology information available\n", {}, id="no topology"),
        pytest.param("\n\n", {}, id="nothing"),
    ],
)
def test_leaves_are_what_nodes_hang_on(text: str, leaves: dict[str, str]) -> None:
    assert parse_topology(text) == {name: expand(nodes) for name, nodes in leaves.items()}


def test_a_node_list_that_cannot_be_read_is_named_with_its_line() -> None:
    with pytest.raises(LocalizeError, match="line 2"):
        parse_topology("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n[1-\n")


def test_a_node_on_two_leaves_is_refused() -> None:
    with pytest.raises(LocalizeError, match="node n1 hangs on b and on a"):
        parse_topology("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n")


@given(st.text() | st.text(alphabet="SwitchName=odeLv01 []-,()\n#"))
def test_no_text_crashes_the_parser(text: str) -> None:
    with contextlib.suppress(LocalizeError):
        parse_topology(text)
