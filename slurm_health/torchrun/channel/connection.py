# SPDX-License-Identifier: Apache-2.0
"""Lines over a socket: bounded in length, and never waited for."""

from __future__ import annotations

import contextlib
import select
import socket
import time

from slurm_health.records.text import LineBuffer
from slurm_health.system.signals import signals_delayed

_READ_BYTES = 1 << 16
# What may wait for an end that does not read.
_MOST_WAITING_BYTES = 64 << 20


class Closed(Exception):
    """The other end is gone, or has said what cannot be."""


class Connection:
    """One connected socket. `most_bytes` is how long a line may be."""

    def __init__(self, sock: socket.socket, most_bytes: int) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # not TCP
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.most_bytes = most_bytes
        self._socket = sock
        self._lines = LineBuffer()
        self._leaving = b""

    def fileno(self) -> int:
        """Return the socket's number, for a selector."""
        return self._socket.fileno()

    @property
    def waits_to_send(self) -> bool:
        """Whether something is left that the socket did not take."""
        return bool(self._leaving)

    @property
    def own_host(self) -> str:
        """This machine's address on this connection."""
        return str(self._socket.getsockname()[0])

    @property
    def peer(self) -> str:
        """The other machine's address."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return "an unknown address"

    def read(self) -> list[bytes]:
        """Return the lines that have arrived, without waiting.

        Raises:
            Closed: nothing more will come, or a line is too long.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as err:
            raise Closed(err.strerror or str(err)) from err
        if not data:
            raise Closed("the connection was closed")
        lines = self._lines.feed(data)
        if max([self._lines.begun_bytes, *map(len, lines)]) > self.most_bytes:
            raise Closed(f"a line has more than {self.most_bytes} bytes")
        return lines

    def send(self, data: bytes) -> None:
        """Send as much as the socket takes; the rest is sent by `flush`.

        Raises:
            Closed: the other end is gone, or has not read for long.
        """
        self._leaving += data
        self.flush()
        if len(self._leaving) > _MOST_WAITING_BYTES:
            raise Closed("the other end does not read")

    def flush(self) -> None:
        """Send what is left.

        Raises:
            Closed: the other end is gone.
        """
        try:
            while self._leaving:
                # What has left and still stands here would be sent twice: a last word comes next.
                with signals_delayed():
                    self._leaving = self._leaving[self._socket.send(self._leaving) :]
        except BlockingIOError:
            pass
        except OSError as err:
            raise Closed(err.strerror or str(err)) from err

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket, once the other end has taken what was sent, or this time is over."""
        until_s = time.monotonic() + linger_s
        with contextlib.suppress(Closed, OSError):
            while self._leaving and time.monotonic() < until_s:
                select.select([], [self], [], until_s - time.monotonic())
                self.flush()
            if linger_s:
                self._socket.shutdown(socket.SHUT_WR)
            # What has arrived and was not read would make the kernel take back what was sent.
            while (left_s := until_s - time.monotonic()) > 0.0:
                select.select([self], [], [], left_s)
                self.read()
        self._socket.close()
