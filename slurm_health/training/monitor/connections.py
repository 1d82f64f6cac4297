# SPDX-License-Identifier: Apache-2.0
"""TCP connections of this user's on which is sent again and again, as the kernel shows them."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

# Each is sent again after twice the time: four are some seconds without an answer.
_IN_VAIN = 4
_MOST = 256  # of each node
_LISTENS = "0A"  # TCP_LISTEN (include/net/tcp_states.h)
_RETRANSMITS = "01"  # the kernel's number of the timer that sends again


def broken(root: Path = Path("/proc")) -> tuple[tuple[str, int], ...]:
    """Return the far ends of connections with unanswered data, and how often it was sent again."""
    own = str(os.geteuid())
    found = []
    for fields in _sockets(root):
        timer = fields[5].partition(":")[0]
        sent_again = int(fields[6], 16)
        if fields[7] == own and timer == _RETRANSMITS and sent_again >= _IN_VAIN:
            found.append((_address(fields[2]), sent_again))
    return tuple(found[:_MOST])


def own_addresses(root: Path = Path("/proc")) -> tuple[str, ...]:
    """Return this node's ends of this user's connections, which need no name of an interface."""
    own = str(os.geteuid())
    found = {_address(fields[1]) for fields in _sockets(root) if fields[7] == own}
    return tuple(sorted(each for each in found if not ipaddress.ip_address(each).is_loopback))


def listeners(address: str, port: int, root: Path = Path("/proc")) -> set[int]:
    """Return whose processes of this node listen where a connection to this address arrives."""
    found = set()
    for fields in _sockets(root, listening=True):
        local = ipaddress.ip_address(_address(fields[1]))
        here = local.is_unspecified or local == ipaddress.ip_address(address)
        if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port and here:
            found.add(int(fields[7]))
    return found


def _sockets(root: Path, *, listening: bool = False) -> Iterator[list[str]]:
    """Yield the fields of /proc/net/tcp and tcp6, of connections or of sockets that listen.

    They are own and far end, state, queues, timer, …, uid.
    """
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / "self" / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 8 and fields[2].endswith(":0000") == listening:
                yield fields


def _address(text: str) -> str:
    """Return an address from its hexadecimal words, each in the order of this machine's bytes."""
    digits = text.partition(":")[0]
    words = [int(digits[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
