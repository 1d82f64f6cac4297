# SPDX-License-Identifier: Apache-2.0
"""The group of light workers: each sends to the next one and receives from the one before it.

The connections are of the interface that the job's data would take. Whatever waits here looks every
few milliseconds whether it is to stop, so no worker is ever stuck in an exchange.

They find each other in a store: one of them serves values by keys, as torch's store does. A request
is a line of JSON, and so is its answer. Whoever reaches the port could write into it, as into
torch's store: what is read from it are addresses and numbers, and no value is ever executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from slurm_health.preflight.probes.context import ProbeContext
from slurm_health.preflight.probes.host import address_of
from slurm_health.preflight.probes.kits import Check
from slurm_health.preflight.probes.meeting import POLL_S, connected

_LOOK_MS = 20  # how often an exchange looks whether it is to stop
_HELLO = 8  # bytes, the first of a connection: whose it is
_NUMBER = 8
# Of `struct tcp_info` (linux/tcp.h): `tcpi_total_retrans`.
_TCP_INFO_BYTES, _TOTAL_RETRANS = 104, slice(100, 104)


class Ring:
    """One rank of a group, connected with the next and the one before."""

    def __init__(self, rank: int, size: int, check: Check) -> None:
        self.rank, self.size = rank, size
        self._check = check
        self._next: socket.socket | None = None
        self._before: socket.socket | None = None

    def connect(self, store: Any, name: str, address: str) -> None:
        """Connect with both neighbours, who do the same.

        Raises:
            Unreachable: the next one does not answer.
            ConnectionError: one of them is gone.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=64) as listening:
            port = listening.getsockname()[1]
            store.set(f"{name}/at/{self.rank}", json.dumps([address, port]))
            following = (self.rank + 1) % self.size
            key = f"{name}/at/{following}"
            while not store.check([key]):
                self._check()
                time.sleep(POLL_S)
            there, at = json.loads(store.get(key))
            self._next = connected(there, at, self._check, source=address)
            self._next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._next.send(self.rank.to_bytes(_HELLO, "big"))
            self._before = self._accepted(listening)

    def _accepted(self, listening: socket.socket) -> socket.socket:
        """Return the connection of the one before; others that come are none of the group.

        One of these that says nothing holds up nobody.
        """
        listening.setblocking(False)
        hello = ((self.rank - 1) % self.size).to_bytes(_HELLO, "big")
        poll = select.poll()
        poll.register(listening, select.POLLIN)
        silent: dict[int, socket.socket] = {}
        try:
            while True:
                for descriptor, _ in poll.poll(_LOOK_MS):
                    if descriptor == listening.fileno():
                        with contextlib.suppress(OSError):  # it is gone again
                            each, _ = listening.accept()
                            silent[each.fileno()] = each
                            poll.register(each, select.POLLIN)
                        continue
                    each = silent.pop(descriptor)
                    poll.unregister(descriptor)
                    if _said(each) == hello:
                        each.setblocking(False)
                        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        return each
                    each.close()
                self._check()
        finally:
            for each in silent.values():
                each.close()

    def gather(self, parts: memoryview) -> None:
        """Fill the parts of all ranks, one after another in an array; one's own is there already.

        Raises:
            ConnectionError: a neighbour is gone.
        """
        length = len(parts) // self.size
        for step in range(self.size - 1):
            sent, received = (self.rank - step) % self.size, (self.rank - step - 1) % self.size
            self._exchange(
                parts[sent * length : (sent + 1) * length],
                parts[received * length : (received + 1) * length],
            )

    def numbers(self, mine: int) -> list[int]:
        """Return the number that each rank gives."""
        values = bytearray(_NUMBER * self.size)
        values[_NUMBER * self.rank : _NUMBER * (self.rank + 1)] = mine.to_bytes(_NUMBER, "big")
        self.gather(memoryview(values))
        places = range(0, len(values), _NUMBER)
        return [int.from_bytes(values[place : place + _NUMBER], "big") for place in places]

    def retransmitted(self) -> int:
        """Return how many segments to the next rank were sent again: lost on their way, or late."""
        assert self._next is not None
        info = self._next.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        return int.from_bytes(info[_TOTAL_RETRANS], sys.byteorder)

    def close(self) -> None:
        """End both connections."""
        for each in (self._next, self._before):
            if each is not None:
                each.close()
        self._next = self._before = None

    def _exchange(self, out: memoryview, into: memoryview) -> None:
        """Send all of one while receiving all of the other."""
        following, before = self._next, self._before
        assert following is not None
        assert before is not None
        poll = select.poll()
        if out:
            poll.register(following, select.POLLOUT)
        if into:
            poll.register(before, select.POLLIN)
        while out or into:
            ready = poll.poll(_LOOK_MS)
            self._check()
            for descriptor, _ in ready:
                if descriptor == following.fileno():
                    out = out[_sent(following, out) :]
                    if not out:
                        poll.unregister(following)
                else:
                    into = into[self._received(before, into) :]
                    if not into:
                        poll.unregister(before)

    def _received(self, before: socket.socket, into: memoryview) -> int:
        try:
            count = before.recv_into(into)
        except BlockingIOError:
            return 0
        if not count:
            raise ConnectionError(f"rank {(self.rank - 1) % self.size} has closed its connection")
        return count


class RingMembership:
    """At most one group at a time; nothing in it waits without looking whether it is to stop."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._store: Any = None
        self._rings: list[Ring] = []
        self._rank = 0

    @property
    def whole(self) -> Ring | None:
        """The group as a whole, None while there is none."""
        return self._rings[0] if self._rings else None

    def form(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        timeout: timedelta,  # noqa: ARG002 - the agent keeps it
        check: Check,
    ) -> None:
        """Form it with all its members."""
        self._store, self._rank = store, rank
        self._joined(list(range(world_size)), "all", check)

    def part(self, ranks: Sequence[int], *, timeout: timedelta, check: Check) -> Ring:  # noqa: ARG002
        """Return a part of it with these ranks."""
        return self._joined(ranks, "-".join(map(str, ranks)), check)

    def _joined(self, ranks: Sequence[int], name: str, check: Check) -> Ring:
        ring = Ring(ranks.index(self._rank), len(ranks), check)
        self._rings.append(ring)
        ring.connect(self._store, name, address_of(self._environ))
        return ring

    def exchange_first(self, group: Ring | None, check: Check) -> None:  # noqa: ARG002 - each knows it
        """Make sure that a part (None: the whole group) can exchange data at all."""
        ring = group or self.whole
        assert ring is not None
        found = ring.numbers(ring.rank)
        if found != list(range(ring.size)):
            raise RuntimeError(f"the group's first exchange failed: it brought {found}")

    def leave(self) -> None:
        """Leave it, if there is one."""
        for ring in self._rings:
            ring.close()
        self._rings = []

    def leave_broken(self) -> bool:
        """Leave it whatever its members do; this worker stays good."""
        self.leave()
        return True

    def interrupt(self) -> None:
        """Nothing waits here that does not hear of an abort by itself."""


class LightContext(ProbeContext):
    """The context of a light probe: its group is a `Ring`."""

    def slowest_ms(self, elapsed_ms: float) -> float:
        """Return the longest of the ranks' times, the same on all of them, and never 0."""
        mine_ns = max(1000, round(elapsed_ms * 1e6))
        return max(self.group.numbers(mine_ns) if self.world_size > 1 else [mine_ns]) / 1e6


def _said(each: socket.socket) -> bytes:
    """Return the first that one says which has something to say; so little comes as a whole."""
    with contextlib.suppress(OSError):
        return each.recv(_HELLO)
    return b""


def _sent(following: socket.socket, out: memoryview) -> int:
    try:
        return following.send(out)
    except BlockingIOError:
        return 0


class _Values(socketserver.ThreadingTCPServer):
    """Serves values by keys; a thread for each connection."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        super().__init__(("", 0), _Requests)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that is gone: its agent does."""


class _Requests(socketserver.StreamRequestHandler):
    """The requests of one client."""

    server: _Values

    def handle(self) -> None:
        """Answer until the client leaves."""
        for line in self.rfile:
            keys, value = json.loads(line)
            values = self.server.values
            if value is not None:
                values[keys[0]] = value
            self.wfile.write(json.dumps([values.get(key) for key in keys]).encode() + b"\n")


def serve() -> tuple[object, int]:
    """Serve a store for as long as this process lives; return it and its port."""
    server = _Values()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, int(server.server_address[1])


class LightStore:
    """The values below one prefix, over a connection that other prefixes may share."""

    def __init__(self, connection: _Connection, prefix: str) -> None:
        self._connection = connection
        self._prefix = prefix

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._connection.ask([f"{self._prefix}/{key}"], value)

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        (value,) = self._connection.ask([f"{self._prefix}/{key}"])
        return str(value).encode()

    def check(self, keys: list[str]) -> bool:
        """Tell whether there is a value of each key."""
        return None not in self._connection.ask([f"{self._prefix}/{key}" for key in keys])


class _Connection:
    """One client's connection to a store."""

    def __init__(self, address: str, port: int, timeout: timedelta) -> None:
        limit_s = timeout.total_seconds()
        self._socket = socket.create_connection((address, port), timeout=limit_s)
        self._lines = self._socket.makefile("rwb")

    def ask(self, keys: list[str], value: str | None = None) -> list[str | None]:
        """Write a value of the first key, if there is one; return those of all keys.

        Raises:
            ConnectionError: who serves the store is gone.
        """
        self._lines.write(json.dumps([keys, value]).encode() + b"\n")
        self._lines.flush()
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the worker that serves the rendezvous closed the connection")
        found: list[str | None] = json.loads(line)
        return found

    def store(self, prefix: str) -> LightStore:
        """Return the part of the store below a prefix."""
        return LightStore(self, prefix)


def opened(address: str, port: int, timeout: timedelta) -> _Connection:
    """Connect to a store."""
    return _Connection(address, port, timeout)
