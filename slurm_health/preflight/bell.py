# SPDX-License-Identifier: Apache-2.0
"""The doorbell between master and agents: it says that there is something new to read, and no more.

The channel is there already: the standard streams of the step, which srun forwards. An agent that
has written prints a line with its node's name; the master that has written sends a line to all. It
never carries what stands in the journal, and nobody waits for it: a ring that is lost, torn or late
costs time, because everybody also looks by himself now and then.
"""

from __future__ import annotations

import contextlib
import os
import stat

from slurm_health.records.text import LineBuffer

_RING = b"slurm-health: news of "
_ALL = b"slurm-health: news\n"
_MOST_BYTES = 65536  # of what is read at once, and kept of a line that does not end


class Bell:
    """An agent's end of it: standard input and output, where they are pipes or sockets."""

    def __init__(self, node: str, inward: int = 0, outward: int = 1) -> None:
        self._line = _RING + node.encode() + b"\n"
        self._inward = inward if _carries(inward) else None
        self._outward = outward if _carries(outward) else None

    @property
    def descriptor(self) -> int | None:
        """What becomes readable when the master rings; None when it can do so no more."""
        return self._inward

    def ring(self) -> None:
        """Tell the master that this node has written. Nothing is waited for."""
        if self._outward is not None:
            with contextlib.suppress(OSError):  # it is full, and rings, or nobody is there
                os.write(self._outward, self._line)

    def heard(self) -> bool:
        """Tell whether the master has rung since the last call."""
        if self._inward is None:
            return False
        rung = False
        try:
            while data := os.read(self._inward, _MOST_BYTES):
                rung = True
                if len(data) < _MOST_BYTES:
                    return rung
        except BlockingIOError:
            return rung
        except OSError:
            pass
        self._inward = None
        return rung


class Ringers:
    """The master's reading of one stream: whose rings have arrived."""

    def __init__(self) -> None:
        self._lines = LineBuffer(_MOST_BYTES)

    def rung(self, data: bytes) -> list[str]:
        """Return the nodes in whole lines of rings; other lines say nothing."""
        return [
            line.removeprefix(_RING).decode(errors="replace")
            for line in self._lines.feed(data)
            if line.startswith(_RING)
        ]


def ring_all(outward: int) -> None:
    """Tell all agents behind a pipe that there are orders; nothing is waited for."""
    with contextlib.suppress(OSError):  # full of rings that have not been heard, or nobody is there
        os.write(outward, _ALL)


def _carries(descriptor: int) -> bool:
    """Tell whether a bell can be heard there; from then on nothing there waits."""
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode):
            return False
        os.set_blocking(descriptor, False)
    except OSError:
        return False
    return True
