# SPDX-License-Identifier: Apache-2.0
"""How the members of a group come together, and can be told to stop waiting for each other.

Everything here waits in Python, where an abort is heard: torch's own rendezvous cannot be
interrupted. Each function is given `check`, which raises once the agent has said to stop.
"""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

POLL_S = 0.005
# Two and a half seconds, in which the kernel repeats six of the attempts: with half of the packets
# lost each way, all sixteen of them go unanswered in one case of a hundred.
ATTEMPTS, ATTEMPT_S = 10, 0.25
_ERROR = (socket.SOL_SOCKET, socket.SO_ERROR)


class Unreachable(Exception):
    """The place where a group meets does not answer: its host, this one or the way is at fault."""


class Meeting:
    """The members of a group, and the store through which they find each other."""

    def __init__(
        self, group: dict[str, Any], timeout: timedelta, check: Callable[[], None]
    ) -> None:
        address, port = str(group["address"]), int(group["port"])
        _wait_for_port(address, port, check)
        self.store = dist.PrefixStore(
            str(group["prefix"]),
            dist.TCPStore(address, port, None, False, timeout=timeout, wait_for_workers=False),
        )
        self._check = check
        self._group = group
        self._meetings = 0

    def wait_for_all(self) -> None:
        """Return once every member has called this as often; raise what `check` raises."""
        self._meetings += 1
        self.store.set(f"here/{self._meetings}/{self._group['rank']}", "1")
        ranks = range(int(self._group["world_size"]))
        everyone = [f"here/{self._meetings}/{rank}" for rank in ranks]
        while not self.store.check(everyone):
            self._check()
            time.sleep(POLL_S)


def _wait_for_port(address: str, port: int, check: Callable[[], None]) -> None:
    """Return once a connection is answered there.

    The kernel answers for a process that is busy, or stopped: silence is that of its host or of the
    way to it, however loaded either machine is. Who refuses does answer, so that is waited out: the
    process is gone, and its agent says so.

    Raises:
        Unreachable: none of several attempts was answered.
    """
    unanswered: list[socket.socket] = []
    begun_s = -math.inf
    try:
        while not _is_answered(unanswered):
            check()
            if time.monotonic() - begun_s >= ATTEMPT_S:
                if len(unanswered) == ATTEMPTS:
                    raise Unreachable(
                        f"no answer from {address} port {port} to {ATTEMPTS} attempts"
                    )
                unanswered.append(_begin(address, port))
                begun_s = time.monotonic()
            time.sleep(POLL_S)
    finally:
        _close(unanswered)


def _begin(address: str, port: int) -> socket.socket:
    """Begin a connection, and wait for nothing."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, place = found[0]
    attempt = socket.socket(family, kind, protocol)
    attempt.setblocking(False)
    if attempt.connect_ex(place) == errno.ECONNREFUSED:
        attempt.close()  # shows in its state
    return attempt


def _is_answered(attempts: list[socket.socket]) -> bool:
    """Tell whether a connection has come about; forget the attempts once one was refused."""
    for attempt in attempts:
        if attempt.fileno() < 0 or attempt.getsockopt(*_ERROR) == errno.ECONNREFUSED:
            _close(attempts)
            attempts.clear()
            return False
        with contextlib.suppress(OSError):  # not connected
            attempt.getpeername()
            return True
    return False


def _close(attempts: list[socket.socket]) -> None:
    for attempt in attempts:
        attempt.close()
