# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import signal
import socket

import pytest

from slurm_health.torchrun.channel.connection import Connection


class Interrupted(socket.socket):
    """A socket in whose first sending Ctrl-C falls."""

    def __init__(self, other: socket.socket) -> None:
        super().__init__(other.family, other.type, fileno=other.detach())
        self._interrupted = False

    def send(self, data: bytes, flags: int = 0, /) -> int:  # type: ignore[override] # lines only
        count = super().send(data, flags)
        if not self._interrupted:
            self._interrupted = True
            signal.raise_signal(signal.SIGINT)  # to this thread, whatever others there are
        return count


def test_what_an_interrupt_came_into_is_not_sent_twice() -> None:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(Connection(Interrupted(ours), 100)) as connection:
        with pytest.raises(KeyboardInterrupt):
            connection.send(b"once\n")
        connection.send(b"the last word\n")
        assert theirs.recv(100) == b"once\nthe last word\n"
