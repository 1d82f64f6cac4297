# SPDX-License-Identifier: Apache-2.0
"""Lets users in to a server behind a Unix socket: of each so many connections at a time.

A server to which all connections are alike can be filled by one user. Of a Unix socket the kernel
tells who is at the other end (SO_PEERCRED); gRPC does not pass that on, so it stands behind this.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import Counter
from pathlib import Path

from slurm_health.system.accounts import Accounts

# A launcher has one connection, and a user few jobs on a node. Root is let in always.
MOST_OF_USER = 8
# Each has a thread while it lasts.
_MOST = 256
_WAITING = 128  # to be let in
_LOOK_S = 0.5
# For so long whoever does not read keeps its thread.
_SEND_S = 60.0
_PIECE_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Doorman:
    """Passes what comes to its door on to the server at `inner`, and that one's answers back."""

    def __init__(self, inner: Path, accounts: Accounts | None = None) -> None:
        self.inner = inner
        self._accounts = accounts or Accounts()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.settimeout(_LOOK_S)
        self._inside: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def open_at(self, path: Path) -> None:
        """Make a door where nothing is, and let in from now on.

        Raises:
            OSError: it cannot be made.
        """
        self._door.bind(str(path))
        self._door.listen(_WAITING)
        threading.Thread(target=self._let_in, daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more; those inside go when their server does."""
        self._closed.set()

    def _let_in(self) -> None:
        with self._door:
            while not self._closed.is_set():
                # Nobody comes, or this process has no descriptor left, which passes.
                with contextlib.suppress(OSError):
                    caller, _ = self._door.accept()
                    self._receive(caller)

    def _receive(self, caller: socket.socket) -> None:
        user = self._accounts.user(_user_of(caller))
        if self._enters(user):
            threading.Thread(target=self._attend, args=(caller, user), daemon=True).start()
        else:
            caller.close()

    def _attend(self, caller: socket.socket, user: int) -> None:
        try:
            with (
                caller,
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server,
            ):
                server.connect(str(self.inner))
                _pass_on(caller, server)
        finally:
            with self._lock:
                self._inside[user] -= 1

    def _enters(self, user: int) -> bool:
        """Count a user in, unless there are too many."""
        with self._lock:
            full = self._inside[user] >= MOST_OF_USER or self._inside.total() >= _MOST
            if full and user != 0:
                return False
            self._inside[user] += 1
            return True


def _user_of(caller: socket.socket) -> int:
    told = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    return int(user)


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    """Pass on in both ways until either ends."""
    for each in (one, other):
        each.settimeout(_SEND_S)
    ways = {one.fileno(): (one, other), other.fileno(): (other, one)}
    watched = select.poll()  # select.select takes no descriptor beyond 1023
    for number in ways:
        watched.register(number, select.POLLIN)
    while True:
        for number, _ in watched.poll():
            source, target = ways[number]
            piece = source.recv(_PIECE_BYTES)
            if not piece:
                return
            target.sendall(piece)
