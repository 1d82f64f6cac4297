# SPDX-License-Identifier: Apache-2.0
"""Slow links (tc tbf), dropped packets and cut paths (iptables) on a node's link."""

from typing import TYPE_CHECKING

from .errors import LabError
from .layout import CONTROLLER_ADDRESS, SLURMCTLD_PORT, SLURMD_PORT, SRUN_PORTS

if TYPE_CHECKING:
    from .inside import Inside

_CHAIN = "LAB-DROP"
_SLURMS_PORTS = f"{SLURMCTLD_PORT},{SLURMD_PORT},{SRUN_PORTS[0]}:{SRUN_PORTS[1]}"
# One full-sized offloaded packet: tbf would drop what is larger than its bucket.
_BURST = "64kb"
_LATENCY = "50ms"
# Where nothing is shaped tc complains, and that is what was wanted.
_UNSHAPE = "tc qdisc del dev {} root 2>/dev/null"


def throttle(lab: "Inside", node: str, mbit: float) -> None:
    """Limit both directions of the node's link."""
    if not mbit > 0:
        raise LabError(f"a link has more than 0 Mbit/s, not {mbit:g}")
    lab.paths.network_fault(node).touch()
    shape = ["root", "tbf", "rate", f"{mbit * 1000:.0f}kbit", "burst", _BURST, "latency", _LATENCY]
    lab.run(["tc", "qdisc", "replace", "dev", "eth0", *shape], node=node, cwd="/")
    lab.run(["tc", "qdisc", "replace", "dev", lab.spec.port(node), *shape], cwd="/")


def drop(lab: "Inside", node: str, *, everything: bool) -> None:
    """Drop the node's packets, in both directions."""
    lab.paths.network_fault(node).touch()
    rules = _table(_drop_rules(everything=everything))
    lab.run(["iptables-restore"], node=node, cwd="/", stdin=rules.encode())


def cut(lab: "Inside", node: str, other: str) -> None:
    """Drop the packets between two nodes, in both directions; the rules are the first one's."""
    if node == other:
        raise LabError(f"a path has two ends, and {node} is one node")
    lab.pid(other)  # an unknown name is refused
    lab.paths.network_fault(node).touch()
    rules = _table(_cut_rules(lab.spec.address(other)))
    lab.run(["iptables-restore"], node=node, cwd="/", stdin=rules.encode())


def _cut_rules(address: str) -> str:
    rules = [
        f":{_CHAIN} - [0:0]",
        f"-A INPUT -s {address} -j {_CHAIN}",
        f"-A OUTPUT -d {address} -j {_CHAIN}",
        f"-A {_CHAIN} -p tcp -m multiport --ports {_SLURMS_PORTS} -j RETURN",
        f"-A {_CHAIN} -j DROP",
    ]
    return "\n".join(rules)


def _drop_rules(*, everything: bool) -> str:
    spared = [
        f"-A {_CHAIN} -s {CONTROLLER_ADDRESS} -j RETURN",
        f"-A {_CHAIN} -d {CONTROLLER_ADDRESS} -j RETURN",
        f"-A {_CHAIN} -p tcp -m multiport --ports {_SLURMS_PORTS} -j RETURN",
    ]
    rules = [
        f":{_CHAIN} - [0:0]",
        f"-A INPUT -i eth0 -j {_CHAIN}",
        f"-A OUTPUT -o eth0 -j {_CHAIN}",
        *([] if everything else spared),
        f"-A {_CHAIN} -j DROP",
    ]
    return "\n".join(rules)


def clear(lab: "Inside", node: str) -> None:
    """Let the node's link be as it was."""
    if lab.paths.network_fault(node).exists():
        inside = f"{_UNSHAPE.format('eth0')}; exec iptables-restore"
        lab.run(["sh", "-c", inside], node=node, cwd="/", stdin=_table("").encode())
        lab.run(["sh", "-c", f"{_UNSHAPE.format(lab.spec.port(node))}; true"], cwd="/")
        lab.paths.network_fault(node).unlink()


def _table(rules: str) -> str:
    policies = ":INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]"
    return f"*filter\n{policies}\n{rules}\nCOMMIT\n"
