# SPDX-License-Identifier: Apache-2.0
"""`python -m slurm_health.training.monitor.agent`: samples the ranks on one node.

It sleeps, samples the ranks on its node, sends a report, and leaves when its reader has gone. If
asked, it inspects the ranks, twice, or says how the node is. It holds no device, changes nothing,
and makes no call to Slurm.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from pathlib import Path

import msgspec

from slurm_health.records.text import LineBuffer
from slurm_health.training.diagnosis.samples import NodeReport, merge
from slurm_health.training.monitor.connections import broken, own_addresses, traffic
from slurm_health.training.monitor.messages import INSPECT, STATE, lines_of
from slurm_health.training.monitor.ranks import Ranks

JOB = "SLURM_JOB_ID"
TRAINING = "SLURM_HEALTH_TRAINING"
"""What `run` sets outside Slurm, for a training's processes to be known by."""
SAMPLE_S = 5.0
# New processes are searched for so often; that costs more than a sample of those that are known.
_FIND_S = 15.0
# The watch writes so often that it is there. Counted in samples, in which we run ourselves: a job
# that is suspended stands still as a whole.
_LOST_SAMPLES = 24
_BETWEEN_S = 4.0  # the two looks of an inspection
_OLD_S = 60.0  # after that processes are searched for half as often


class ReaderGone(Exception):
    """Nobody reads what this agent sends any more."""


class Agent:
    """Samples the ranks of one job on this node.

    Args:
        ranks: those.
        node: its name.
        began_s: when the script began, in seconds since the epoch.
        scale: of all times, for a rehearsal in which time is compressed.
    """

    def __init__(self, ranks: Ranks, node: str, began_s: float, scale: float = 1.0) -> None:
        self._ranks = ranks
        self._node = node
        self._began_s = began_s
        self._scale = scale
        self._lines = LineBuffer()
        self._asked: list[bytes] = []
        self._unread = self._sent = 0
        self._begun_s = self._woke_s = time.monotonic()
        self._awake_since_s = 0.0
        self._find_again_s = 0.0

    def run(self) -> None:
        """Serve until standard input ends, or is silent for too long."""
        due_s = time.monotonic()
        try:
            while self._unread < _LOST_SAMPLES:
                self._wait(due_s - time.monotonic())
                while self._asked:
                    self._answer(self._asked.pop(0))
                if time.monotonic() >= due_s:
                    due_s = time.monotonic() + self._scale * SAMPLE_S
                    self._unread += 1
                    self._find()
                    ranks = tuple(self._ranks.sample(self._awake_since_s))
                    self._send(NodeReport(node=self._node, ranks=ranks))
        except ReaderGone:
            pass

    def _wait(self, wait_s: float) -> None:
        """Wait for a word of the watch, and note if we were not running meanwhile.

        While we did not run, the ranks did not either: what came before is no standstill.

        Raises:
            ReaderGone: standard input ended.
        """
        ready, _, _ = select.select([0], [], [], max(0.0, wait_s))
        now_s = time.monotonic()
        if now_s - self._woke_s > 4 * self._scale * SAMPLE_S:
            self._awake_since_s = now_s
        self._woke_s = now_s
        if ready:
            data = os.read(0, 4096)
            if not data:
                raise ReaderGone
            self._unread = 0
            self._asked += self._lines.feed(data)

    def _find(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._find_again_s:
            is_old = now_s - self._begun_s > _OLD_S
            self._find_again_s = now_s + (2 if is_old else 1) * self._scale * _FIND_S
            self._ranks.find()

    def _answer(self, word: bytes) -> None:
        if word == INSPECT:
            self._ranks.find()
            first, _ = self._looked(again=False)
            began_s = time.monotonic()
            until_s = began_s + self._scale * _BETWEEN_S
            while (left_s := until_s - time.monotonic()) > 0:
                self._wait(left_s)
            window_s = time.monotonic() - began_s
            second, not_seen = self._looked(again=True)
            merged = merge(first, second, window_s)
            self._send(msgspec.structs.replace(merged, not_seen=not_seen))
        elif word == STATE:
            # Not before it is asked for: it takes some megabytes.
            from slurm_health.training.monitor.node_state import node_state

            state = node_state(
                job=os.environ.get(JOB, ""),
                node=self._node,
                began_s=self._began_s,
                directory=Path.cwd(),
                ended=False,
            )
            self._send(NodeReport(node=self._node, state=state))

    def _looked(self, *, again: bool) -> tuple[NodeReport, dict[str, str]]:
        carried = traffic()
        ranks, not_seen = self._ranks.inspect(again=again)
        report = NodeReport(
            node=self._node,
            ranks=tuple(ranks),
            inspected=True,
            addresses=own_addresses() if again else (),
            broken=broken() if again else (),
            sent=carried.sent,
            received=carried.received if again else traffic().received,
        )
        return report, not_seen

    def _send(self, report: NodeReport) -> None:
        """Write each line with one call: lines of several nodes do not mix."""
        self._sent += 1
        for line in lines_of(report, self._sent):
            os.write(1, line)


def main() -> int:
    """Serve."""
    parser = argparse.ArgumentParser(prog="slurm_health.training.monitor.agent")
    parser.add_argument("--job", required=True)  # the value of the variable that marks processes
    parser.add_argument("--variable", default=JOB)
    parser.add_argument("--node", required=True)  # if Slurm does not say which it is
    parser.add_argument("--step", default="")  # which alone is watched
    parser.add_argument("--began-s", type=float, required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # `sbatch --signal` sends them to every step
    node = os.environ.get("SLURMD_NODENAME") or options.node
    ranks = Ranks(
        options.job,
        node,
        os.environ.get("SLURM_STEP_ID", "") if options.variable == JOB else "",
        variable=options.variable,
        only_step=options.step,
    )
    try:
        Agent(ranks, node, options.began_s, options.scale).run()
    except BrokenPipeError:  # the watch is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
