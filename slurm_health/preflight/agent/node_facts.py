# SPDX-License-Identifier: Apache-2.0
"""What an agent needs to know of its node before any torch is loaded.

And which devices each node has that processes of one machine play.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import msgspec

from slurm_health.records.probe_catalog import ON_CPUS

_SIOCGIFADDR = 0x8915
_LEAST_SIMD_UNITS = 100
_ANY_PORT = 9  # no packet is sent: connecting a datagram socket only chooses a route
# NCCL refuses two ranks on one device ("Duplicate GPU detected") unless they say that they are on
# different hosts. Such hosts have nothing in common but sockets: no adapter, no NVLink domain.
_SEPARATE_HOSTS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}


def own_address(environ: Mapping[str, str], hostname: str) -> str:
    """Return the address under which the other nodes of the job reach this one.

    It is that of the interface which the job names for its data. Else it is the source address of
    the route to where srun was started, or the node's own name, the last choice: Debian resolves it
    to 127.0.1.1, which no other node can reach.
    """
    named = _address_on(environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0])
    if named and not named.startswith("127."):
        return named
    target = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if target:
        try:
            family = socket.AF_INET6 if ":" in target else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, _ANY_PORT))
                return str(probe.getsockname()[0])
        except OSError:
            pass  # an unroutable address: fall back on the name
    try:
        return socket.gethostbyname(hostname)
    except OSError:
        return hostname


def leaf_switch(environ: Mapping[str, str]) -> str:
    """Return the leaf switch of this node, empty where Slurm does not know it.

    slurmd tells every task the way down to its node, `spine.leaf1.n1`, and what its parts are,
    `switch.switch.node`, when a topology plugin is in use. It costs no call to the controller.
    """
    parts = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    pattern = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(pattern) < 2 or pattern[-2:] != ["switch", "node"] or len(parts) < len(pattern):
        return ""
    return parts[len(pattern) - 2]


def interface_of(address: str) -> str | None:
    """Return the network interface that has this IPv4 address, None where there is none."""
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if _address_on(name) == address), None)


def _address_on(name: str) -> str:
    """Return the IPv4 address of an interface, empty where it has none."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return ""


def chosen_interface(environ: Mapping[str, str], address: str, backend: str) -> str:
    """Say over which interface workers of this backend open connections to other nodes.

    It is what the user's variable says. Without one, gloo is told the interface of the node's own
    `address`, and NCCL looks for itself.
    """
    on_cpus = backend in ON_CPUS
    variable = "GLOO_SOCKET_IFNAME" if on_cpus else "NCCL_SOCKET_IFNAME"
    if environ.get(variable):
        return f"{variable}={environ[variable]}"
    own = interface_of(address) or address
    return own if on_cpus else f"NCCL's own choice (the node's address is on {own})"


def device_count(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Return how many accelerators this process may use, 0 on a CPU node."""
    return len(visible_devices(environ, root).names)


def visible_devices(environ: Mapping[str, str], root: Path = Path("/")) -> VisibleDevices:
    """Return the accelerators this process may use, and the variable that chooses among them."""
    for variable in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if variable in environ:
            items = [item.strip() for item in environ[variable].split(",")]
            names = tuple(takewhile(_names_device, items))  # CUDA ends at the first that names none
            return VisibleDevices(variable=variable, names=names)
    count = _nvidia_devices(root) or _amd_devices(root)
    return VisibleDevices(names=tuple(str(number) for number in range(count)))


def _nvidia_devices(root: Path) -> int:
    try:
        return len(list((root / "proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0


def _amd_devices(root: Path) -> int:
    """Return how many AMD accelerators the kernel's driver for computing (KFD) has.

    It lists processors too, which have no SIMD units, and graphics inside of processors, which have
    less than 100. A part of a divided Instinct MI300X has 152.
    """
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    return sum(_simd_units(properties) >= _LEAST_SIMD_UNITS for properties in nodes)


def _simd_units(properties: Path) -> int:
    try:
        lines = properties.read_text().splitlines()
    except OSError:
        return 0  # another job's: its cgroup keeps this one from reading
    counts = [line.split()[1] for line in lines if line.startswith("simd_count ")]
    return int(counts[0]) if counts and counts[0].isdecimal() else 0


def driver_keeps_state(root: Path = Path("/")) -> bool:
    """Tell whether NVIDIA's driver is known to stay initialised while no process uses it.

    Its persistence daemon does that; that persistence mode was switched on without it is not seen.
    """
    return (root / "run/nvidia-persistenced/socket").exists()


def missing_devices(environ: Mapping[str, str], visible: int, *, gpus: int = 0) -> str:
    """Say how many accelerators this process sees of those Slurm gave the job here.

    `gpus` is what the job has on this node where that is known; what Slurm tells a step is the
    step's own share, which may be smaller. Empty where this process sees them all, or Slurm does
    not say.
    """
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    given = max(gpus, int(count) if count.isdecimal() else 0)
    if given <= visible:
        return ""
    return f"Slurm gave the job {given} GPUs here, {visible or 'none'} of them can be seen"


def usable_cpus(environ: Mapping[str, str]) -> int:
    """Return how many CPUs the job holds on this node."""
    given = environ.get("SLURM_CPUS_ON_NODE", "")
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(int(given), allowed) if given.isdecimal() else allowed)


def _names_device(item: str) -> bool:
    return bool(item) and item not in {"-1", "NoDevFiles"}


class VisibleDevices(msgspec.Struct, frozen=True, kw_only=True):
    """The accelerators that a process may use, by number or UUID, as `variable` lists them."""

    variable: str = "CUDA_VISIBLE_DEVICES"
    names: tuple[str, ...] = ()


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
    share = count // len(nodes)
    return {
        node: {devices.variable: ",".join(devices.names[number * share : (number + 1) * share])}
        for number, node in enumerate(nodes)
    }
