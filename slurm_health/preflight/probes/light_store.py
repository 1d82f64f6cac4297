# SPDX-License-Identifier: Apache-2.0
"""Where light workers find each other: one of them serves values by keys, as torch's store does.

A request is a line of JSON, and so is its answer. Whoever reaches the port could write into it, as
into torch's store: what is read from it are addresses and numbers, and no value is ever executed.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from datetime import timedelta
from typing import Any


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
