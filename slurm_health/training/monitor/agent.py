# SPDX-License-Identifier: Apache-2.0
"""`python -m slurm_health.training.monitor.agent`: samples the ranks on one node.

It sleeps, samples the ranks on its node, sends a report, and leaves when its reader has gone. On
request it inspects the ranks, twice, or sends the node's state. It holds no device, changes
nothing, and makes no call to Slurm.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from slurm_health.records.text import LineBuffer
from slurm_health.system import WATCHED
from slurm_health.training.diagnosis.samples import Look, NodeReport
from slurm_health.training.monitor.connections import reached, traffic
from slurm_health.training.monitor.messages import INSPECT, REACH, STATE, lines_of
from slurm_health.training.monitor.ranks import Ranks, located

JOB = "SLURM_JOB_ID"
TRAINING = "SLURM_HEALTH_TRAINING"
"""Set by `run` outside Slurm, to mark the processes of a training."""
SAMPLE_S = 5.0
_FIND_S = 15.0  # between two searches for new processes, which cost more than a sample
_OLD_S = 60.0  # after that processes are searched for half as often
# The watch writes every ten seconds. Counted in samples, because a suspended job stands still as a
# whole.
_LOST_SAMPLES = 24
_BETWEEN_S = 4.0  # the two samples of an inspection
_REACH_S = 3.5  # a second attempt to connect comes after one second, a third after two more
_MOST_BYTES = 256 << 10  # of a node's state
_ALIVE_S = 60.0  # between two touches of the file by which root sees that this agent lives


class Agent:
    """Samples the ranks of one job on this node.

    Args:
        ranks: the ranks on this node.
        options: of the command line, with the name of this node.
    """

    def __init__(self, ranks: Ranks, options: argparse.Namespace) -> None:
        self._ranks = ranks
        self._options = options
        self._sent = 0
        self._alive_s = float("-inf")
        # Of the watch of a whole job. It is left behind: if the job runs on, its watch has died.
        whole = options.variable == JOB and not (options.ended or options.step)
        self._sign = Path(WATCHED, f"{os.getuid()}.{options.job}") if whole else None

    def run(self) -> None:
        """Serve until standard input ends, or is silent for too long.

        After the end of a script, send the node's state and leave: srun forwards no request before
        all nodes have started, and one may be lost.
        """
        if self._options.ended:
            self._answer(STATE)
            return
        lines, scale = LineBuffer(), self._options.scale
        begun_s = due_s = find_s = time.monotonic()
        unread = 0
        while unread < _LOST_SAMPLES:
            if select.select([0], [], [], max(0.0, due_s - time.monotonic()))[0]:
                data = os.read(0, 4096)
                if not data:
                    return
                unread = 0
                for word in lines.feed(data):
                    self._answer(word)
            now_s = time.monotonic()
            if now_s < due_s:
                continue
            unread += 1
            if self._sign is not None and now_s - self._alive_s >= self._options.scale * _ALIVE_S:
                self._alive_s = now_s
                with contextlib.suppress(OSError):  # no health check of root's has made its place
                    self._sign.touch(0o600)
            due_s = now_s + scale * SAMPLE_S
            if now_s >= find_s:
                is_old = now_s - begun_s > _OLD_S
                find_s = now_s + (2 if is_old else 1) * scale * _FIND_S
                self._ranks.find()
            self._send(self._report(Look.SAMPLE))

    def _answer(self, word: bytes) -> None:
        """Inspect the ranks, twice, send the node's state, or try to reach other nodes.

        Ranks work to answer. So they are sampled after their first answer and before the second
        question: the activity between is their own. No report is sent meanwhile, because the
        connections of the batch node would show it.
        """
        if word == INSPECT:
            self._ranks.find()
            where, _ = self._ranks.locate(again=False)
            report = self._report(Look.BASELINE, connections=True)
            first = msgspec.structs.replace(report, ranks=located(report.ranks, where))
            time.sleep(self._options.scale * _BETWEEN_S)
            report = self._report(Look.INSPECTION, connections=True)
            where, unavailable = self._ranks.locate(again=True)
            ranks = located(report.ranks, where)
            self._send(first)
            self._send(msgspec.structs.replace(report, ranks=ranks, unavailable=unavailable))
            self._send(self._report(Look.BASELINE))
        elif word == STATE:
            # It takes some megabytes, and most agents never need it.
            from slurm_health.training.monitor.node_state import node_state, within

            given = self._options
            state = node_state(
                os.environ.get(JOB, ""),
                given.node,
                given.began_s,
                given.directory,
                self._ranks if given.ended else None,
                with_dumps=given.ended,
            )
            self._send(NodeReport(node=given.node, state=within(state, given.most_bytes)))
        elif word.startswith(REACH):
            _, asked, *addresses = word.decode().split()
            if self._options.node in asked.split(","):
                answered = reached(addresses, _REACH_S)
                self._send(NodeReport(node=self._options.node, reached=answered))

    def _report(self, look: Look, *, connections: bool = False) -> NodeReport:
        """Return a report with samples of the ranks on this node."""
        report = NodeReport(
            node=self._options.node,
            at_s=round(time.monotonic(), 3),
            ranks=tuple(self._ranks.sample()),
            look=look,
        )
        if not connections:
            return report
        carried = traffic()
        return msgspec.structs.replace(
            report,
            addresses=carried.addresses,
            broken=carried.broken,
            sent=carried.sent,
            received=carried.received,
        )

    def _send(self, report: NodeReport) -> None:
        """Write every line with one call, so that lines of several nodes do not mix."""
        self._sent += 1
        for line in lines_of(report, self._sent):
            os.write(1, line)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve with these options, those of the command line if there are none."""
    parser = argparse.ArgumentParser(prog="slurm_health.training.monitor.agent")
    parser.add_argument(
        "--job", required=True
    )  # the value of the variable that marks its processes
    parser.add_argument("--variable", default=JOB)
    parser.add_argument("--node", default="")  # if Slurm does not say which it is
    parser.add_argument("--step", default="")  # the only watched one
    parser.add_argument("--began-s", type=float, required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--ended", action="store_true")  # the script has
    parser.add_argument("--directory", type=Path, default=Path.cwd())  # in which it was started
    parser.add_argument("--most-bytes", type=int, default=_MOST_BYTES)  # of a node's state
    options = parser.parse_args(arguments)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # `sbatch --signal` sends them to every step
    options.node = os.environ.get("SLURMD_NODENAME") or options.node
    # Of an agent that srun started; a fork of the watch may be in the watched one.
    own_step = os.environ.get("SLURM_STEP_ID", "") if options.variable == JOB else ""
    own_step = own_step if own_step != options.step else ""
    ranks = Ranks(
        options.job, options.node, own_step, variable=options.variable, only_step=options.step
    )
    try:
        Agent(ranks, options).run()
    except BrokenPipeError:  # the watch is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
