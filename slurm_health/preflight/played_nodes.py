# SPDX-License-Identifier: Apache-2.0
"""Which devices each node has, where the processes of one machine play several nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# NCCL refuses two ranks on one device ("Duplicate GPU detected") unless they say that they are on
# different hosts. Such hosts have nothing in common but sockets: no adapter, no NVLink domain.
_SEPARATE_HOSTS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}


@dataclass(frozen=True, kw_only=True)
class VisibleDevices:
    """The accelerators that a process may use, by number or UUID, as `variable` lists them.

    `is_chosen`: the environment names them, or that there are to be none.
    """

    variable: str = "CUDA_VISIBLE_DEVICES"
    names: tuple[str, ...] = ()
    is_chosen: bool = False


def share_devices(nodes: Sequence[str], devices: VisibleDevices) -> bool:
    """Tell whether there are fewer devices than nodes, so that some nodes have the same one."""
    return 0 < len(devices.names) < len(nodes)


def environ_of_each(nodes: Sequence[str], devices: VisibleDevices) -> dict[str, Mapping[str, str]]:
    """Return the variables that give each node its devices.

    All nodes have equally many, because ranks of the same number are partners: those left over
    are not used. Where there are too few, each node has one, by turns, and is a host of its own.
    """
    count = len(devices.names)
    if not count:
        return {node: {} for node in nodes}
    if share_devices(nodes, devices):
        return {
            node: {
                devices.variable: devices.names[number % count],
                "NCCL_HOSTID": node,
                **_SEPARATE_HOSTS,
            }
            for number, node in enumerate(nodes)
        }
    each = count // len(nodes)
    return {
        node: {devices.variable: ",".join(devices.names[number * each : (number + 1) * each])}
        for number, node in enumerate(nodes)
    }
