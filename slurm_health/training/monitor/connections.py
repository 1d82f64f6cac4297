# SPDX-License-Identifier: Apache-2.0
"""This user's TCP connections as the kernel shows them: which get no answer, how much is sent.

How much was sent is asked through a netlink socket of sock_diag(7), which needs no right; /proc
does not tell it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Each is sent again after twice the time: four are some seconds without an answer.
_IN_VAIN = 4
_MOST = 256  # of each node
_LISTENS = "0A"  # TCP_LISTEN (include/net/tcp_states.h)
_RETRANSMITS = "01"  # the kernel's number of the timer that sends again
_SOCK_DIAG = 4  # the family of netlink
_BY_FAMILY, _DONE, _ERROR = 20, 3, 2  # types of messages
_REQUEST, _DUMP = 0x1, 0x300
_ESTABLISHED = 1 << 1
_INFO = 2  # the attribute that holds struct tcp_info
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ASK = struct.Struct("=BBBxI48x")  # family, protocol, wanted attributes, states
_FAR = slice(24, 40)  # of the answer: the far end's address, of which IPv4 has the first four bytes
_UID_AT, _ATTRIBUTES_AT = 64, 72
# Of struct tcp_info, since Linux 4.10: what was acknowledged and what came; µs with something to
# send, and of these with a peer that took no more.
_BYTES_AT, _BUSY_AT = 120, 168
_TWO_COUNTS = struct.Struct("=QQ")
_LIMIT_S = 1.0


def broken(root: Path = Path("/proc")) -> tuple[tuple[str, int], ...]:
    """Return the far ends of connections with unanswered data, and how often that was resent."""
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


def listening(root: Path = Path("/proc")) -> Iterator[tuple[int, int, str]]:
    """Yield port, owner and inode of each TCP socket of this node that listens."""
    for fields in _sockets(root, listening=True):
        if fields[3] == _LISTENS:
            yield int(fields[1].rpartition(":")[2], 16), int(fields[7]), fields[9]


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


class Traffic(NamedTuple):
    """What this user's connections of this node have carried so far.

    `sent` has by far address the bytes that were sent to it, and the seconds in which they were:
    that is when there was something to send and its receiver took it. `received` are all bytes
    that came. Empty and 0 where the kernel does not tell.
    """

    sent: dict[str, tuple[int, float]]
    received: int


def traffic() -> Traffic:
    """Return what was sent and received."""
    sums: dict[str, tuple[int, float]] = {}
    received_bytes = 0
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            for address, acked, came, seconds in _connections(family):
                so_far = sums.get(address, (0, 0.0))
                sums[address] = so_far[0] + acked, round(so_far[1] + seconds, 6)
                received_bytes += came
    return Traffic(sent=sums, received=received_bytes)


def _connections(family: int) -> Iterator[tuple[str, int, int, float]]:
    own = os.geteuid()
    for message in _answers(family):
        if struct.unpack_from("=I", message, _UID_AT)[0] != own:
            continue
        info = _attribute(message)
        if len(info) < _BUSY_AT + _TWO_COUNTS.size:  # an older kernel
            continue
        acked, came = _TWO_COUNTS.unpack_from(info, _BYTES_AT)
        busy_us, refused_us = _TWO_COUNTS.unpack_from(info, _BUSY_AT)
        seconds = max(0, busy_us - refused_us) / 1e6
        yield _far_address(family, message[_FAR]), acked, came, seconds


def _answers(family: int) -> Iterator[bytes]:
    """Yield what the kernel tells of each connection.

    Raises:
        OSError: it tells nothing of them.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        netlink.settimeout(_LIMIT_S)
        ask = _ASK.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
        header = _HEADER.pack(_HEADER.size + len(ask), _BY_FAMILY, _REQUEST | _DUMP, 1, 0)
        netlink.send(header + ask)
        while True:
            data = netlink.recv(1 << 16)
            while len(data) >= _HEADER.size:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind in {_DONE, _ERROR} or length < _HEADER.size:
                    return
                yield data[_HEADER.size : length]
                data = data[_aligned(length) :]


def _attribute(message: bytes) -> bytes:
    """Return struct tcp_info out of an answer, empty where it has none."""
    at = _ATTRIBUTES_AT
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == _INFO:
            return message[at + 4 : at + length]
        at += max(4, _aligned(length))
    return b""


def _far_address(family: int, data: bytes) -> str:
    address = ipaddress.ip_address(data if family == socket.AF_INET6 else data[:4])
    return str(getattr(address, "ipv4_mapped", None) or address)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
