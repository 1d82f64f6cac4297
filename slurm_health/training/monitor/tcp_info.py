# SPDX-License-Identifier: Apache-2.0
"""How much this user's TCP connections have sent, and how long that took, by the kernel's count.

It is asked through a netlink socket of sock_diag(7), which needs no right; /proc does not tell it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator

_SOCK_DIAG = 4  # the family of netlink
_BY_FAMILY, _DONE, _ERROR = 20, 3, 2  # types of messages
_REQUEST, _DUMP = 0x1, 0x300
_ESTABLISHED = 1 << 1
_INFO = 2  # the attribute that holds struct tcp_info
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ASK = struct.Struct("=BBBxI48x")  # family, protocol, wanted attributes, states
_FAR = slice(24, 40)  # of the answer: the far end's address, of which IPv4 has the first four bytes
_UID_AT, _ATTRIBUTES_AT = 64, 72
# Of struct tcp_info, since Linux 4.10: what was acknowledged; µs with something to send, and of
# these with a peer that took no more.
_ACKED_AT, _BUSY_AT = 120, 168
_TWO_COUNTS = struct.Struct("=QQ")
_LIMIT_S = 1.0


def sent() -> dict[str, tuple[int, float]]:
    """Return by far address the bytes that were sent to it, and the seconds in which they were.

    The time is that in which there was something to send and its receiver took it. Empty where the
    kernel does not tell.
    """
    sums: dict[str, tuple[int, float]] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            for address, acked, seconds in _connections(family):
                so_far = sums.get(address, (0, 0.0))
                sums[address] = so_far[0] + acked, round(so_far[1] + seconds, 6)
    return sums


def _connections(family: int) -> Iterator[tuple[str, int, float]]:
    own = os.geteuid()
    for message in _answers(family):
        if struct.unpack_from("=I", message, _UID_AT)[0] != own:
            continue
        info = _attribute(message)
        if len(info) < _BUSY_AT + _TWO_COUNTS.size:  # an older kernel
            continue
        acked = struct.unpack_from("=Q", info, _ACKED_AT)[0]
        busy_us, refused_us = _TWO_COUNTS.unpack_from(info, _BUSY_AT)
        yield _address(family, message[_FAR]), acked, max(0, busy_us - refused_us) / 1e6


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


def _address(family: int, data: bytes) -> str:
    address = ipaddress.ip_address(data if family == socket.AF_INET6 else data[:4])
    return str(getattr(address, "ipv4_mapped", None) or address)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
