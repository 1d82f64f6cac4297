# SPDX-License-Identifier: Apache-2.0
"""The lab's network, as `ip -batch` reads it: one bridge, and a pair of interfaces for each node.

The machine's table of neighbours is one for all network namespaces and holds 1,024
(`net.ipv4.neigh.default.gc_thresh3`); what does not fit is not sent. Each node has an entry for the
controller and for every node that it talks to. In a large lab all entries are fixed ones, which
do not count: nodes send everything to the controller, and that passes it on.
"""

from pathlib import Path

from .layout import CONTROLLER_ADDRESS, PREFIX_LENGTH, LabSpec

# 200 nodes have been seen to fit, beside other labs.
_MOST_NEIGHBOURS = 200
_BRIDGE_MAC = "02:4c:00:00:ff:ff"
_NETWORK = "10.77.0.0/16"
_SETTINGS = Path("/proc/sys/net")


def prepare(spec: LabSpec) -> None:
    """Set what the calling process's network namespace must have before it has links."""
    if not _is_large(spec):
        return
    for name, value in (
        # Each node that comes up would tell all others so, several times.
        ("ipv6/conf/all/disable_ipv6", "1"),
        ("ipv6/conf/default/disable_ipv6", "1"),
        ("ipv4/ip_forward", "1"),
        ("ipv4/conf/all/send_redirects", "0"),
        ("ipv4/conf/default/send_redirects", "0"),
    ):
        path = _SETTINGS / name
        if path.exists():
            path.write_text(value)


def bridge(spec: LabSpec) -> list[str]:
    """Make the bridge, which is the controller's interface too."""
    mac = f"address {_BRIDGE_MAC} " if _is_large(spec) else ""
    return [
        "link set lo up",
        f"link add br0 {mac}type bridge",
        f"addr add {CONTROLLER_ADDRESS}/{PREFIX_LENGTH} dev br0",
        "link set br0 up",
    ]


def port(spec: LabSpec, node: str, holder: int) -> list[str]:
    """Connect a node, whose network namespace a process holds."""
    name, mac = spec.port(node), _mac(spec, node)
    known = f"neigh replace {spec.address(node)} lladdr {mac} dev br0 nud permanent"
    return [
        f"link add {name} type veth peer name eth0 address {mac} netns {holder}",
        f"link set {name} master br0 up",
        *([known] if _is_large(spec) else []),
    ]


def link(spec: LabSpec, node: str) -> list[str]:
    """Bring up what a node has, from inside."""
    up = ["link set lo up", "link set eth0 up"]
    address = spec.address(node)
    if not _is_large(spec):
        return [up[0], f"addr add {address}/{PREFIX_LENGTH} dev eth0", up[1]]
    return [
        *up,
        f"addr add {address}/32 dev eth0",
        f"neigh replace {CONTROLLER_ADDRESS} lladdr {_BRIDGE_MAC} dev eth0 nud permanent",
        f"route add {CONTROLLER_ADDRESS} dev eth0 src {address}",
        f"route add {_NETWORK} via {CONTROLLER_ADDRESS} src {address}",
    ]


def _is_large(spec: LabSpec) -> bool:
    return len(spec.nodes) > _MOST_NEIGHBOURS


def _mac(spec: LabSpec, node: str) -> str:
    index = spec.nodes.index(node)
    return f"02:4c:00:00:{index // 256:02x}:{index % 256:02x}"
