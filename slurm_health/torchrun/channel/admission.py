# SPDX-License-Identifier: Apache-2.0
"""Node 0's port: who comes in, and who does not.

Any process may connect. One that has not proven what is asked for gets little: a short line, a few
seconds, and one of few places.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurm_health.records.errors import ChannelError
from slurm_health.records.text import cut, one_line
from slurm_health.torchrun.arguments import NodeZeroAddress
from slurm_health.torchrun.channel import messages
from slurm_health.torchrun.channel.connection import Closed, Connection
from slurm_health.torchrun.channel.messages import Challenge, Hello, NodeRefused, Proof

# The training that was just ended may still hold the port.
PORT_FREE_S = 15.0
_RETRY_S = 0.2
# Strangers may not take the places of nodes, nor fill the terminal.
_MOST_VISITORS = 256
_MOST_SAID = 20
_SHOWN = 200

Welcomes = Callable[[Hello, Connection], str]
"""Takes a node in that has proven itself, or returns why not."""


@dataclass
class _Visitor:
    connection: Connection
    until_s: float
    nonce: str
    hello: Hello | None = None


class Admission:
    """Listens where the nodes meet; hands over those that may come in."""

    def __init__(
        self,
        meeting: NodeZeroAddress,
        secret: bytes,
        nodes: Sequence[str],
        selector: selectors.BaseSelector,
        welcomes: Welcomes,
        say: Callable[[str], None],
    ) -> None:
        """Open the port, for `nodes`, in the order of their ranks.

        Raises:
            ChannelError: it is taken, or may not be opened.
        """
        self._secret = secret
        self._nodes = nodes
        self._selector = selector
        self._welcomes = welcomes
        self._say = say
        self._said: set[str] = set()
        self._visitors: dict[int, _Visitor] = {}
        self._listeners = _listening(meeting, say)
        for listener in self._listeners:
            selector.register(listener, selectors.EVENT_READ, self._accept)

    def expire(self) -> None:
        """Send those away that take too long."""
        now_s = time.monotonic()
        for visitor in [each for each in self._visitors.values() if now_s > each.until_s]:
            self._send_away(visitor, f"has not said who it is within {messages.HANDSHAKE_S:g} s")

    def close(self) -> None:
        """Close the port, for the training to open."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners = []
        for visitor in list(self._visitors.values()):
            self._forget(visitor).close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            found, _ = listener.accept()
        except OSError:  # it is gone again, or there are no more descriptors
            return
        if len(self._visitors) >= _MOST_VISITORS:
            oldest = min(self._visitors.values(), key=lambda each: each.until_s)
            self._forget(oldest).close()
        connection = Connection(found, messages.MOST_UNPROVEN_BYTES)
        visitor = _Visitor(
            connection, time.monotonic() + messages.HANDSHAKE_S, secrets.token_hex(16)
        )
        self._visitors[connection.fileno()] = visitor
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._hear(visitor))

    def _hear(self, visitor: _Visitor) -> None:
        try:
            for line in visitor.connection.read():
                if visitor.connection.fileno() not in self._visitors:
                    return  # it has come in, and may say nothing before it hears so
                self._answer(visitor, messages.at_node_zero(line))
        except (Closed, ValueError) as err:
            self._send_away(visitor, "" if isinstance(err, Closed) else "is not a node of this run")

    def _answer(self, visitor: _Visitor, message: messages.ToNodeZero) -> None:
        match message:
            case Hello() if visitor.hello is None:
                visitor.hello = message
                challenge = Challenge(
                    nonce=visitor.nonce,
                    secret=bool(self._secret),
                    proof=messages.proof(self._secret, "node0", message, visitor.nonce),
                )
                visitor.connection.send(messages.encode(challenge))
            case Proof(proof=given) if visitor.hello is not None:
                expected = messages.proof(self._secret, "node", visitor.hello, visitor.nonce)
                if not messages.proves(given, expected):
                    self._refuse(visitor, "it has another secret than node0, or none")
                    return
                connection = self._forget(visitor)
                connection.most_bytes = messages.MOST_BYTES
                if why := self._welcomes(visitor.hello, connection):
                    self._refuse(visitor, why)
            case _:
                raise ValueError("unexpected message")

    def _refuse(self, visitor: _Visitor, why: str) -> None:
        with contextlib.suppress(Closed):
            visitor.connection.send(messages.encode(NodeRefused(why=why)))
        self._send_away(visitor, f"is refused: {why}")

    def _send_away(self, visitor: _Visitor, why: str) -> None:
        if why:
            who = visitor.connection.peer
            if visitor.hello is not None:
                who = f"{one_line(visitor.hello.host)} ({who}){self._as_whom(visitor.hello.rank)}"
            self._tell(cut(f"{who} {why}", _SHOWN))
        self._forget(visitor).close()

    def _as_whom(self, rank: int) -> str:
        """Say which node a visitor says that it is, nothing where none has its rank."""
        return f", as {self._nodes[rank]}," if 0 <= rank < len(self._nodes) else ""

    def _forget(self, visitor: _Visitor) -> Connection:
        if self._visitors.pop(visitor.connection.fileno(), None) is not None:
            self._selector.unregister(visitor.connection)
        return visitor.connection

    def _tell(self, text: str) -> None:
        """Say something once, and not too much."""
        if text not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(text)
            self._say(text)


def _listening(meeting: NodeZeroAddress, say: Callable[[str], None]) -> list[socket.socket]:
    """Return sockets on all addresses of this machine: its name may mean one that it does not have.

    Raises:
        ChannelError: the port is taken, or may not be opened.
    """
    until_s = time.monotonic() + PORT_FREE_S
    waiting = f"port {meeting.port} is in use; waiting up to {PORT_FREE_S:g} s for it"
    while True:
        try:
            return _opened(meeting.port)
        except OSError as err:
            if err.errno != errno.EADDRINUSE or time.monotonic() > until_s:
                raise _unusable(meeting, err) from err
        if waiting:
            say(waiting)
            waiting = ""
        time.sleep(_RETRY_S)


def _opened(port: int) -> list[socket.socket]:
    found = []
    try:
        for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104
            try:
                listener = socket.socket(family, socket.SOCK_STREAM)
            except OSError:  # the kernel has no IPv6, or no IPv4
                continue
            found.append(listener)
            # The training's own port may still be waiting for late packets of an earlier one.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                listener.bind((host, port))
            except OSError as err:
                if err.errno != errno.EADDRNOTAVAIL:  # IPv6 is switched off
                    raise
                found.remove(listener)
                listener.close()
                continue
            listener.listen(socket.SOMAXCONN)
            listener.setblocking(False)
    except OSError:
        for listener in found:
            listener.close()
        raise
    return found


def _unusable(meeting: NodeZeroAddress, err: OSError) -> ChannelError:
    why = f"node0 cannot listen on port {meeting.port} of this machine: {err.strerror}"
    if err.errno == errno.EADDRINUSE:
        why += "; another run or training has it: give each run on a machine its own MASTER_PORT"
    elif err.errno == errno.EACCES:
        why += "; choose one above 1023 with MASTER_PORT"
    return ChannelError(meeting.text, why)
