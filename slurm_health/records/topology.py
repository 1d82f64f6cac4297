# SPDX-License-Identifier: Apache-2.0
"""Which nodes hang on which leaf switch, from the text of `scontrol show topology`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from slurm_health.records.errors import LocalizeError
from slurm_health.records.nodeset import expand

_FIELD = re.compile(r"(\w+)=(\S*)")
_NAMES = ("switchname", "blockname", "ringname")
_NOTHING = {"", "(null)"}


def parse_topology(text: str) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each leaf switch, block or ring, in the order of the text.

    A tree plugin prints a line per switch, `SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-8]`;
    only level 0 is a leaf. A block plugin prints `BlockName=b1 ... Nodes=n[1-8]`, one for rings
    (26.05) `RingName=r1 Nodes=n[1-8]`. The lines of topology.conf are read as well: there, a switch
    that names nodes is a leaf. Other lines, of a cluster without a topology for instance, say
    nothing.

    Raises:
        LocalizeError: a node list cannot be read, or a node hangs on two leaves.
    """
    leaves: dict[str, tuple[str, ...]] = {}
    home: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        found = _leaf(line)
        if found is None:
            continue
        name, nodelist = found
        try:
            nodes = expand(nodelist)
        except ValueError as err:
            raise LocalizeError(f"topology, line {number}: {err}") from err
        _settle(home, name, nodes, number)
        leaves[name] = (*leaves.get(name, ()), *nodes)
    return leaves


def _leaf(line: str) -> tuple[str, str] | None:
    """Return name and node list of the leaf a line describes, if it describes one."""
    fields = {key.lower(): value for key, value in _FIELD.findall(line.partition("#")[0])}
    name = next((fields[key] for key in _NAMES if key in fields), None)
    nodelist = fields.get("nodes", "")
    if not name or nodelist in _NOTHING or fields.get("level", "0") != "0":
        return None
    return name, nodelist


def _settle(home: dict[str, str], leaf: str, nodes: Iterable[str], number: int) -> None:
    """Note where each node hangs."""
    for node in nodes:
        other = home.setdefault(node, leaf)
        if other != leaf:
            raise LocalizeError(
                f"topology, line {number}: node {node} hangs on {leaf} and on {other}"
            )
