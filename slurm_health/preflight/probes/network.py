# SPDX-License-Identifier: Apache-2.0
"""Which network interface the data of a job takes, and under which address it is reached there."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping

from slurm_health.preflight.probes.context import NotMeasured

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
