# SPDX-License-Identifier: Apache-2.0
"""The TCP sockets of this node by the kernel: unanswered data, traffic, listeners.

They come through a netlink socket of sock_diag(7), which needs no privilege.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# The pause before a retransmission doubles: four are some seconds without an answer.
_IN_VAIN = 4
_MOST = 256  # of a node
# Timers that send again, by number (sock_diag(7)): data without an answer, and probes of a peer
# that took no more. The latter also runs where this node's own firewall drops what is sent.
_SENDS_AGAIN = {1, 4}
_SOCK_DIAG = 4  # the family of netlink
_BY_FAMILY, _DONE, _ERROR = 20, 3, 2  # types of messages
_REQUEST, _DUMP = 0x1, 0x300
# Masks of states (include/net/tcp_states.h): all that have a peer and an owner, and TCP_LISTEN.
_CONNECTED, _LISTENS = sum(1 << state for state in (1, 2, 4, 5, 8, 9, 11)), 1 << 10
_INFO = 2  # the attribute that holds struct tcp_info
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ASK = struct.Struct("=BBBxI48x")  # family, protocol, wanted attributes, states
# struct inet_diag_msg: timer, retransmits, port, own address, the peer's, user, inode.
_SOCKET = struct.Struct("=xxBB2sxx16s16s24xII")
# Of struct tcp_info, since Linux 4.10: acknowledged and received bytes; µs with data to send, and
# of these with a peer that accepted no more.
_BYTES_AT, _BUSY_AT = 120, 168
_TWO_COUNTS = struct.Struct("=QQ")
_LIMIT_S = 1.0
_DISCARD = 9  # a port that hardly any node serves
_ANSWERS = {0, errno.ECONNREFUSED}


class Socket(NamedTuple):
    """One socket: its own end and the peer's, its owner, its traffic.

    `resent` counts what was sent again since the last answer: data, or probes. It sent `acked`
    bytes in `busy_s`, in which it had data to send and its peer accepted it; `received` are bytes.
    The latter three are 0 if the kernel does not count them.
    """

    address: str
    port: int
    peer: str
    uid: int
    inode: int
    resent: int
    acked: int
    received: int
    busy_s: float


class Traffic(NamedTuple):
    """The traffic of this user's connections so far.

    Args:
        broken: the peers' addresses and the retransmissions of those with unanswered data.
        addresses: this node's own.
        sent: by address of the peer the bytes sent, and the seconds that this took.
        received: all received bytes.
    """

    broken: tuple[tuple[str, int], ...]
    addresses: tuple[str, ...]
    sent: dict[str, tuple[int, float]]
    received: int


def traffic() -> Traffic:
    """Return the traffic of this user's connections."""
    own = [item for item in _sockets(_CONNECTED) if item.uid == os.geteuid()]
    sent: dict[str, tuple[int, float]] = {}
    for item in own:
        bytes_so_far, busy_s = sent.get(item.peer, (0, 0.0))
        sent[item.peer] = bytes_so_far + item.acked, round(busy_s + item.busy_s, 6)
    addresses = {item.address for item in own}
    return Traffic(
        broken=tuple((s.peer, s.resent) for s in own if s.resent >= _IN_VAIN)[:_MOST],
        addresses=tuple(sorted(a for a in addresses if not ipaddress.ip_address(a).is_loopback)),
        sent=sent,
        received=sum(item.received for item in own),
    )


def reached(addresses: Sequence[str], limit_s: float) -> tuple[str, ...]:
    """Return the addresses whose nodes answer an attempt to connect, be it by a refusal."""
    answered: set[str] = set()
    with contextlib.ExitStack() as stack:
        pending: dict[socket.socket, str] = {}
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            trial = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            trial.setblocking(False)
            why = trial.connect_ex((address, _DISCARD))
            if why in _ANSWERS:
                answered.add(address)
            elif why == errno.EINPROGRESS:
                pending[trial] = address
        until_s = time.monotonic() + limit_s
        while pending and (left_s := until_s - time.monotonic()) > 0.0:
            for trial in select.select([], pending, [], left_s)[1]:
                address = pending.pop(trial)
                if trial.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                    answered.add(address)
    return tuple(address for address in addresses if address in answered)


def listening() -> Iterator[Socket]:
    """Yield the sockets of this node that listen."""
    return _sockets(_LISTENS)


def listeners(address: str, port: int) -> set[int]:
    """Return the users whose processes on this node listen on an address and port."""
    ends = {address, "0.0.0.0", "::"}  # noqa: S104 - nothing is bound
    return {item.uid for item in listening() if item.port == port and item.address in ends}


def _sockets(states: int) -> Iterator[Socket]:
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # the kernel lists none
            for message in _messages(family, states):
                timer, resent, port, own, peer, uid, inode = _SOCKET.unpack_from(message)
                info, at = b"", _SOCKET.size
                while at + 4 <= len(message) and not info:
                    length, kind = struct.unpack_from("=HH", message, at)
                    info = message[at + 4 : at + length] if kind == _INFO else b""
                    at += max(4, _aligned(length))
                acked = received = busy_us = refused_us = 0
                if len(info) >= _BUSY_AT + _TWO_COUNTS.size:
                    acked, received = _TWO_COUNTS.unpack_from(info, _BYTES_AT)
                    busy_us, refused_us = _TWO_COUNTS.unpack_from(info, _BUSY_AT)
                yield Socket(
                    address=_address(family, own),
                    port=int.from_bytes(port, "big"),
                    peer=_address(family, peer),
                    uid=uid,
                    inode=inode,
                    resent=resent if timer in _SENDS_AGAIN else 0,
                    acked=acked,
                    received=received,
                    busy_s=max(0, busy_us - refused_us) / 1e6,
                )


def _messages(family: int, states: int) -> Iterator[bytes]:
    """Yield the kernel's messages, one per socket.

    Raises:
        OSError: it lists nothing.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        netlink.settimeout(_LIMIT_S)
        ask = _ASK.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), states)
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


def _address(family: int, data: bytes) -> str:
    address = ipaddress.ip_address(data if family == socket.AF_INET6 else data[:4])
    return str(getattr(address, "ipv4_mapped", None) or address)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
