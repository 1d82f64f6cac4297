# SPDX-License-Identifier: Apache-2.0
"""The lab's network, as `ip -batch` reads it: one bridge, and a pair of interfaces for each node.

The machine's table of neighbours is one for all network namespaces and holds 1,024
(`net.ipv4.neigh.default.gc_thresh3`); what does not fit is not sent. Each node has an entry for the
controller and for every node that it talks to: a lab has 200 nodes at most.
"""

from .layout import CONTROLLER_ADDRESS, PREFIX_LENGTH, LabSpec


def bridge() -> list[str]:
    """Make the bridge, which is the controller's interface too."""
    return [
        "link set lo up",
        "link add br0 type bridge",
        f"addr add {CONTROLLER_ADDRESS}/{PREFIX_LENGTH} dev br0",
        "link set br0 up",
    ]


def port(spec: LabSpec, node: str, holder: int) -> list[str]:
    """Connect a node, whose network namespace a process holds."""
    name = spec.port(node)
    return [
        f"link add {name} type veth peer name eth0 netns {holder}",
        f"link set {name} master br0 up",
    ]


def link(spec: LabSpec, node: str) -> list[str]:
    """Bring up what a node has, from inside."""
    address = f"addr add {spec.address(node)}/{PREFIX_LENGTH} dev eth0"
    return ["link set lo up", address, "link set eth0 up"]
