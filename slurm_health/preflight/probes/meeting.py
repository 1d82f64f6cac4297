# SPDX-License-Identifier: Apache-2.0
"""How workers reach each other, in an order in which one that hangs is known.

Everything here waits in Python, where an abort ends it: torch's own rendezvous cannot be
interrupted. `check` raises once the agent has said to stop.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable

from slurm_health.preflight.probes.context import Unreachable

Check = Callable[[], None]
POLL_S = 0.005
# Two and a half seconds, in which the kernel repeats six of the attempts: with half of the packets
# lost each way, all sixteen of them go unanswered in one case of a hundred.
ATTEMPTS, ATTEMPT_S = 10, 0.25


def connected(address: str, port: int, check: Check, *, source: str = "") -> socket.socket:
    """Return a connection once one is answered there; it is made from the address `source`.

    The kernel answers for a process that is busy, or stopped: silence is that of its host or of the
    way to it, however loaded either machine is. Who refuses does answer, so that is waited out: the
    process is gone, and its agent says so.

    Raises:
        Unreachable: none of several attempts was answered.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    attempts: list[socket.socket] = []
    due_s = 0.0
    try:
        while True:
            check()
            if time.monotonic() >= due_s:
                if len(attempts) == ATTEMPTS:
                    raise Unreachable(
                        f"no answer from {address} port {port} to {ATTEMPTS} attempts"
                    )
                due_s = time.monotonic() + ATTEMPT_S
                attempt = socket.socket(family, kind, protocol)
                attempts.append(attempt)
                attempt.setblocking(False)
                if source:
                    attempt.bind((source, 0))
                refused = attempt.connect_ex(place) == errno.ECONNREFUSED
            else:
                refused = False
            poll = select.poll()
            for attempt in attempts:
                poll.register(attempt, select.POLLOUT)
            ready = {descriptor for descriptor, _ in poll.poll(POLL_S * 1e3)}
            for attempt in [a for a in attempts if a.fileno() in ready and not refused]:
                failure = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failure == errno.ECONNREFUSED:
                    refused = True
                elif not failure and _is_connected(attempt):
                    attempts.remove(attempt)
                    return attempt
            if refused:
                for attempt in attempts:
                    attempt.close()
                attempts.clear()
            if ready:
                time.sleep(POLL_S)  # what has failed is ready at once, again and again
    finally:
        for attempt in attempts:
            attempt.close()


def _is_connected(attempt: socket.socket) -> bool:
    try:
        attempt.getpeername()
    except OSError:
        return False
    return True


def circles(local_rank: int, local_size: int) -> list[list[int]]:
    """Return the groups of a device, by local ranks, in the order in which they are formed.

    In each turn every device is in one group at most: in the first by itself, in the others with
    one other, as in a tournament (the circle method): all but the last go round in a circle. Who
    has no partner in a turn has an empty group.
    """
    players = local_size + local_size % 2  # an odd one out plays against nobody
    last = circle = players - 1
    turns = [[local_rank]]
    for turn in range(circle if local_size > 1 else 0):
        if local_rank == last:
            other = next(player for player in range(circle) if 2 * player % circle == turn)
        else:
            other = (turn - local_rank) % circle
            other = last if other == local_rank else other
        turns.append(sorted((local_rank, other)) if other < local_size else [])
    return turns
