# SPDX-License-Identifier: Apache-2.0
"""The Unix socket of a server, and who is let in: of each user so many connections at a time.

A server to which all connections are alike can be filled by one user. Of a Unix socket the kernel
tells who is at the other end (SO_PEERCRED); gRPC does not pass that on, so it stands behind this.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_health.records.errors import UsageError
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
_CLAIMED_WITHIN_S, _CLAIM_LOOK_S = 2.0, 0.05
# sockaddr_un has room for 107 (unix(7)); the name that a socket is made with is longer.
_PATH_BYTES = 95
# Jobs of all users ask. Whom a site wants to keep out, it does by the directory's permissions.
_SOCKET_MODE = 0o666
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


@contextlib.contextmanager
def listening(server: Any, path: Path) -> Iterator[None]:
    """Have a server answer at a path, where no other does; afterwards nothing is there.

    The socket is made beside the path and renamed when it can be used: who finds it can connect,
    and what a killed server left is replaced.

    Raises:
        UsageError: there can be no socket at this path.
    """
    made = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        own = tempfile.TemporaryDirectory(prefix="slurm-health-")  # closed to other users
    except OSError as err:
        raise _refused(path, f"no temporary directory can be made: {err}") from err
    with own as place:
        doorman = Doorman(Path(place, "socket"))
        try:
            mine = _publish(server, doorman, made, path)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    if path.stat().st_ino == mine:
                        path.unlink()
        finally:
            doorman.close()
            server.stop(None).wait()
            made.unlink(missing_ok=True)


def _publish(server: Any, doorman: Doorman, made: Path, path: Path) -> int:
    """Start a server behind a door that is made as `made` and found at `path`; return its inode."""
    try:
        with _claim(path):
            server.add_insecure_port(f"unix:{doorman.inner}")
            server.start()
            doorman.open_at(made)
            made.chmod(_SOCKET_MODE)
            inode = made.stat().st_ino
            made.rename(path)
            return inode
    except OSError as err:
        raise _refused(path, err.strerror or str(err)) from err
    except RuntimeError as err:  # what gRPC raises where it cannot bind
        raise _refused(path, f"no socket can be made in {doorman.inner.parent}") from err


@contextlib.contextmanager
def _claim(path: Path) -> Iterator[None]:
    """Keep other servers from this path while it is found free and taken.

    Raises:
        UsageError: another server answers there, or something that is no socket is there.
        OSError: its directory cannot be used.
    """
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise _refused(path, f"it is longer than {_PATH_BYTES} bytes; choose a shorter one")
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(directory)
        if path.exists() and not path.is_socket():
            raise _refused(path, "something else is there; remove it, or choose another path")
        if _is_answered(path):
            raise _refused(
                path, "another server answers there; end it first, or choose another path"
            )
        yield
    finally:
        os.close(directory)


def _lock(directory: int) -> None:
    """Hold back a server that starts in the same moment.

    Whoever may read the directory can lock it for ever, so it is not waited for longer than such a
    start takes.
    """
    until_s = time.monotonic() + _CLAIMED_WITHIN_S
    while time.monotonic() < until_s:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_CLAIM_LOOK_S)


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # who fills a server's queue would keep this one waiting
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            return True
    return True


def _refused(path: Path, why: str) -> UsageError:
    return UsageError(f"cannot serve at {path}: {why}")
