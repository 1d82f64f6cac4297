# SPDX-License-Identifier: Apache-2.0
"""A worker's machine: its processors, their memory, and the interface that the job's data takes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurm_health.preflight.probes.context import NotMeasured

_NODES = Path("/sys/devices/system/node")


def model(threads: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return what nodes must share to be compared: the processors' model, and how many are used."""
    return f"{_cpu_model(cpuinfo)} with {threads} thread{'s' if threads != 1 else ''}"


def memory_bytes() -> tuple[int, int]:
    """Return the free and the total memory of this machine; 0 where it cannot be told."""
    try:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes
    except (OSError, ValueError):
        return 0, 0


def numa_nodes(root: Path = _NODES) -> dict[int, set[int]]:
    """Return the memory nodes of which this process may use processors, with these processors.

    One node with all of them where the kernel tells of none.
    """
    allowed = os.sched_getaffinity(0)
    found = {}
    for place in root.glob("node[0-9]*"):
        try:
            processors = _numbers((place / "cpulist").read_text()) & allowed
        except OSError:
            continue
        if processors:
            found[int(place.name[len("node") :])] = processors
    return dict(sorted(found.items())) or {0: allowed}


@contextlib.contextmanager
def only_on(processors: set[int]) -> Iterator[None]:
    """Have this thread run on these processors, where it first touches memory that is theirs."""
    before = os.sched_getaffinity(0)
    try:
        with contextlib.suppress(OSError):  # taken from the job meanwhile
            os.sched_setaffinity(0, processors)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def _numbers(ranges: str) -> set[int]:
    """Return the numbers of a list of the kernel's: `0-3,8-11`."""
    found: set[int] = set()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _cpu_model(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "cpu"
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else "cpu"


# Variables that name the interfaces a collective library uses. NCCL's may be a pattern of its own
# (^docker, =eth0, eth): only plain names can be looked up.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = "/proc/net/if_inet6"
_GLOBAL = "00"  # the scope of an address by which other nodes can be reached


def require_interfaces(environ: Mapping[str, str]) -> None:
    """Make sure that the interfaces which the environment names exist.

    Raises:
        NotMeasured: one does not.
    """
    present = {found for _, found in socket.if_nameindex()}
    for variable in _INTERFACE_VARIABLES:
        names = [each for each in environ.get(variable, "").split(",") if each]
        if any(not each[0].isalnum() for each in names):
            continue
        exact = variable.startswith("GLOO")
        for each in names:
            if not any(found == each if exact else found.startswith(each) for found in present):
                raise NotMeasured(
                    f"{variable} names the interface {each}, but this node has"
                    f" {', '.join(sorted(present))}"
                )


def address_of(environ: Mapping[str, str]) -> str:
    """Return the address of the interface that the worker is told to use: the first, of several.

    Raises:
        NotMeasured: it has none, or none is named.
    """
    name = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    for address in _addresses(name) if name else ():
        return address
    raise NotMeasured(
        f"the interface {name} has no address" if name else "no interface reaches the other nodes"
    )


def _addresses(name: str) -> Iterator[str]:
    with (
        contextlib.suppress(OSError),  # without an IPv4 address
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked,
    ):
        reply = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        yield socket.inet_ntoa(reply[20:24])
    with contextlib.suppress(OSError), open(_IPV6_ADDRESSES) as file:  # noqa: PTH123
        for line in file:
            packed, _, _, scope, _, interface = line.split()
            if interface == name and scope == _GLOBAL:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed))
