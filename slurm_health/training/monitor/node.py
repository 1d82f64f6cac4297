# SPDX-License-Identifier: Apache-2.0
"""The monitor of one node, beside the job: `python -m slurm_health.training.monitor.node`.

It sleeps, looks at the heartbeats of the ranks on its node, says in a line what it saw, and leaves
when its listener has gone. It holds no device, uses no memory to speak of, and changes nothing.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from slurm_health.records.text import LineBuffer
from slurm_health.training.monitor.closer_look import look_closer
from slurm_health.training.monitor.connections import broken, own_addresses, traffic
from slurm_health.training.monitor.messages import (
    LOOK,
    NOW,
    NodeLook,
    NodeMessage,
    NodeNow,
    lines_of,
)
from slurm_health.training.monitor.ranks import Ranks

INTERVAL_S = 10.0
JOB = "SLURM_JOB_ID"
TRAINING = "SLURM_HEALTH_TRAINING"
"""What `run` sets outside Slurm, for a training's processes to be known by."""
# New processes are looked for this often; that costs more than a look at those that are known.
_FIND_S = 30.0
# The watch says so every interval that it is there. Counted in intervals in which we run ourselves:
# a job that is suspended stands still as a whole.
_LOST_INTERVALS = 12


class NodeMonitor:
    """Looks at the ranks of one job on this node."""

    def __init__(self, ranks: Ranks, node: str, interval_s: float) -> None:
        self._ranks = ranks
        self._node = node
        self._interval_s = interval_s
        self._found_s = -_FIND_S
        self._woke_s = time.monotonic()
        self._awake_since_s = 0.0
        self._lines = LineBuffer()
        self._unheard = 0
        self._said = 0

    def run(self) -> None:
        """Serve until standard input ends, or is silent for too long."""
        due_s = time.monotonic()
        while self._unheard < _LOST_INTERVALS:
            ready, _, _ = select.select([0], [], [], max(0.0, due_s - time.monotonic()))
            self._note_a_gap()
            if ready:
                data = os.read(0, 4096)
                if not data:
                    return
                self._unheard = 0
                self._serve(data)
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + self._interval_s
                self._unheard += 1
                self._say_now()

    def _note_a_gap(self) -> None:
        """While we did not run, the ranks did not either: what came before is no standstill."""
        now_s = time.monotonic()
        if now_s - self._woke_s > 3 * self._interval_s:
            self._awake_since_s = now_s
        self._woke_s = now_s

    def _serve(self, data: bytes) -> None:
        lines = self._lines.feed(data)
        if LOOK in lines:
            self._say_look()
        elif NOW in lines:
            self._say_now()

    def _say_now(self) -> None:
        if time.monotonic() - self._found_s >= _FIND_S:
            self._found_s = time.monotonic()
            self._ranks.find()
        self._say(NodeNow(self._node, tuple(self._ranks.now(self._awake_since_s))))

    def _say_look(self) -> None:
        self._ranks.find()
        looks, why_not = look_closer(self._ranks)
        now = tuple(self._ranks.now(self._awake_since_s))
        not_seen = {what: f"{why} ({self._node})" for what, why in why_not.items()}
        connections = own_addresses(), broken()
        self._say(NodeLook(self._node, looks, now, *connections, not_seen, *traffic()))

    def _say(self, message: NodeMessage) -> None:
        """Write each line with one call: lines of several nodes do not mix."""
        self._said += 1
        for line in lines_of(message, self._said):
            os.write(1, line)


def main() -> int:
    """Serve; the words are the job, the node where Slurm does not tell it, and the interval.

    A fourth one is the variable that has the job: where that is none of Slurm's, this is no step of
    its own. A fifth one is the step that alone is watched.
    """
    job, node, interval_s, *more = sys.argv[1:6]
    variable, only_step = (*more, "", "")[:2]
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # `sbatch --signal` sends them to every step
    environ = os.environ
    name = environ.get("SLURMD_NODENAME") or node
    variable = variable or JOB
    step = environ.get("SLURM_STEP_ID", "") if variable == JOB else ""
    ranks = Ranks(job, name, step, variable=variable, only_step=only_step)
    try:
        NodeMonitor(ranks, name, float(interval_s)).run()
    except BrokenPipeError:  # the watch is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
