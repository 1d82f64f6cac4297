# SPDX-License-Identifier: Apache-2.0
"""Lines for the machine's log. It is never waited for: what it does not take is lost."""

from __future__ import annotations

import contextlib

SOCKET = "/dev/log"
_DAEMON = 3 << 3
_SEVERITY = {"error": 3, "warning": 4, "info": 6}
_MOST_BYTES = 2000


def send(level: str, line: str, *, to: str = SOCKET) -> None:
    """Write one line; `level` is error, warning or info. A longer one than 2,000 bytes is cut."""
    import socket  # not free, and a node that is well has nothing to say

    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.setblocking(False)
        data = f"<{_DAEMON | _SEVERITY[level]}>{line}".encode(errors="replace")
        log.sendto(data[:_MOST_BYTES], to)
