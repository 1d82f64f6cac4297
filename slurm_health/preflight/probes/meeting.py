# SPDX-License-Identifier: Apache-2.0
"""How the members of a group come together, and can be told to stop waiting for each other.

Everything here waits in Python, where an abort is heard: torch's own rendezvous cannot be
interrupted. Each function is given `check`, which raises once the agent has said to stop. What the
members write into to find each other, torch's store or ours, is one of two kits' (`kits`).

A device that hangs in NCCL's initialisation holds up every other one of its group, and none of them
can tell which it is. So where a group has hung before, each device is connected by itself first,
then each with every other one of its node: who hangs then is known.
"""

from __future__ import annotations

import contextlib
import errno
import math
import select
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_health.preflight.probes.kits import OpenStore, Store

POLL_S = 0.005
# Two and a half seconds, in which the kernel repeats six of the attempts: with half of the packets
# lost each way, all sixteen of them go unanswered in one case of a hundred.
ATTEMPTS, ATTEMPT_S = 10, 0.25
_ERROR = (socket.SOL_SOCKET, socket.SO_ERROR)


class Unreachable(Exception):
    """The place where a group meets does not answer: its host, this one or the way is at fault."""


class GroupMeeting:
    """The members of a group, and the store through which they find each other."""

    def __init__(
        self, group: dict[str, Any], open_store: OpenStore, check: Callable[[], None]
    ) -> None:
        address, port = str(group["address"]), int(group["port"])
        connected(address, port, check).close()
        self._check = check
        self._group = group
        self._part_of = open_store(address, port)
        self.store = self.part_of_store("")
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

    def part_of_store(self, name: str) -> Store:
        """Return a store of its own for some of the members, who all call it by this name."""
        return self._part_of(f"{self._group['prefix']}/{name}")


def connected(
    address: str, port: int, check: Callable[[], None], *, source: str = ""
) -> socket.socket:
    """Return a connection once one is answered there; it is made from the address `source`.

    The kernel answers for a process that is busy, or stopped: silence is that of its host or of the
    way to it, however loaded either machine is. Who refuses does answer, so that is waited out: the
    process is gone, and its agent says so.

    Raises:
        Unreachable: none of several attempts was answered.
    """
    unanswered: list[socket.socket] = []
    begun_s = -math.inf
    try:
        while (answered := _answered(unanswered)) is None:
            check()
            if time.monotonic() - begun_s >= ATTEMPT_S:
                if len(unanswered) == ATTEMPTS:
                    raise Unreachable(
                        f"no answer from {address} port {port} to {ATTEMPTS} attempts"
                    )
                unanswered.append(_begin(address, port, source))
                begun_s = time.monotonic()
                _await_first_word(unanswered[-1])
            else:
                time.sleep(POLL_S)
        return answered
    finally:
        _close(unanswered)


def _begin(address: str, port: int, source: str) -> socket.socket:
    """Begin a connection, and wait for nothing."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, place = found[0]
    attempt = socket.socket(family, kind, protocol)
    attempt.setblocking(False)
    if source:
        attempt.bind((source, 0))
    if attempt.connect_ex(place) == errno.ECONNREFUSED:
        attempt.close()  # shows in its state
    return attempt


def _await_first_word(attempt: socket.socket) -> None:
    """Wait a moment for an answer, which mostly comes within a fraction of it."""
    if attempt.fileno() < 0:
        time.sleep(POLL_S)
        return
    poll = select.poll()
    poll.register(attempt, select.POLLOUT)
    poll.poll(POLL_S * 1e3)


def _answered(attempts: list[socket.socket]) -> socket.socket | None:
    """Return a connection that has come about, and take it from the attempts.

    Forget all of these once one was refused.
    """
    for attempt in attempts:
        if attempt.fileno() < 0 or attempt.getsockopt(*_ERROR) == errno.ECONNREFUSED:
            _close(attempts)
            attempts.clear()
            return None
        with contextlib.suppress(OSError):  # not connected
            attempt.getpeername()
            attempts.remove(attempt)
            return attempt
    return None


def _close(attempts: list[socket.socket]) -> None:
    for attempt in attempts:
        attempt.close()


def circles(local_rank: int, local_size: int) -> list[list[int]]:
    """Return the groups of a device, by local ranks, in the order in which they are formed.

    In each turn every device is in one group at most: in the first by itself, in the others with
    one other, as in a tournament (the circle method). Who has no partner in a turn has an empty
    group.
    """
    players = local_size + local_size % 2  # an odd one out plays against nobody
    found = [[local_rank]]
    for turn in range(players - 1 if local_size > 1 else 0):
        other = _opponent(local_rank, turn, players)
        found.append(sorted((local_rank, other)) if other < local_size else [])
    return found


def _opponent(player: int, turn: int, players: int) -> int:
    """Return with whom a player meets: all but the last go round in a circle."""
    last, circle = players - 1, players - 1
    if player == last:
        return next(each for each in range(circle) if 2 * each % circle == turn)
    other = (turn - player) % circle
    return last if other == player else other
