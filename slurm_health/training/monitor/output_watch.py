# SPDX-License-Identifier: Apache-2.0
"""The watch of a training without a heartbeat: its output, and how its ranks here move.

Nothing is started beside the job until lines that counted steps have stayed away for far longer
than they did before, or the main threads of all ranks of this node have. Then monitors look at the
processes of all nodes for some seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from slurm_health.records.script_records import ProgressSeen
from slurm_health.training.diagnosis.by_movement import Movement
from slurm_health.training.diagnosis.by_output import OutputProgress
from slurm_health.training.diagnosis.rank_now import RankNow
from slurm_health.training.diagnosis.seen import STOPPED
from slurm_health.training.diagnosis.watched import Watched
from slurm_health.training.monitor.findings import Findings
from slurm_health.training.monitor.messages import LOOK, NodeLook, looked_at
from slurm_health.training.monitor.monitors import Monitors, MonitorsEnded
from slurm_health.training.monitor.output_files import Tails

BETWEEN_S = 10.0  # two looks, in which a process that works is seen to
_RECORD_S = 60.0  # from one record of the progress to the next: 250 kB a day
_MOST_STOPPED = 64  # that are named


class OutputWatch:
    """Follows the output; looks at the processes where it stands still.

    Args:
        tails: what was written.
        progress: what that says.
        movement: of the ranks on this node.
        start: starts the monitors of all nodes.
        nodes: those of the job.
        findings: says and records what is found.
        between_s: two looks at the processes.
    """

    def __init__(
        self,
        tails: Tails,
        progress: OutputProgress,
        movement: Movement,
        start: Callable[[], Monitors],
        nodes: Sequence[str],
        findings: Findings,
        between_s: float = BETWEEN_S,
    ) -> None:
        self._tails = tails
        self._progress = progress
        self._movement = movement
        self._start = start
        self._nodes = tuple(nodes)
        self._findings = findings
        self._between_s = between_s
        self._recorded: ProgressSeen | None = None
        self._recorded_s = float("-inf")

    def look(self) -> None:
        """Read what was written; look at the processes where that is due.

        Raises:
            Ended: the script has ended.
        """
        self._read()
        now_s = time.monotonic()
        stalled_s = self._progress.goes_on(now_s)
        if stalled_s is not None and self._progress.latest is not None:
            self._findings.hang_over(stalled_s, self._progress.latest.step)
        if self._progress.suspect(now_s) and self._movement.hung_s is None:
            self._look_at_processes(self._progress)

    def move(self, ranks: Sequence[RankNow], now_s: float) -> None:
        """See whether the ranks here move; look at the processes of all nodes where that is due.

        Raises:
            Ended: the script has ended.
        """
        self._movement.take(ranks, now_s)
        stalled_s = self._movement.goes_on(now_s)
        if stalled_s is not None:
            latest = self._progress.latest
            self._findings.hang_over(stalled_s, latest.step if latest else 0)
        if self._movement.suspect(now_s) and self._progress.hung_s is None:
            self._look_at_processes(self._movement)

    def record(self, ranks: Sequence[RankNow], *, now_s: float, beating: bool = False) -> None:
        """Record how far the training is: seldom, or at once where a rank is stopped or goes on.

        Args:
            ranks: those on the first node of the job, where we are.
            now_s: the time.
            beating: whether a rank has a heartbeat, so that this is the last such record.
        """
        latest = self._progress.latest
        stopped = sorted({each.rank for each in ranks if each.state == STOPPED})[:_MOST_STOPPED]
        known = self._recorded
        news = known is None or known.stopped != stopped or known.beating != beating
        if not news and now_s - self._recorded_s < _RECORD_S:
            return
        self._recorded = ProgressSeen(
            node=self._nodes[0],
            ranks=len(ranks),
            stopped=stopped,
            step=latest.step if latest else 0,
            line=latest.line if latest else "",
            age_s=round(latest.age_s(now_s), 1) if latest else 0.0,
            beating=beating,
        )
        self._recorded_s = now_s
        self._findings.record(self._recorded, lossy=True)

    def _read(self) -> None:
        now_s = time.monotonic()
        for written in self._tails.written():
            lost = self._progress.take(written.file, written.text, now_s, torn=written.torn)
            if lost is not None:
                self._findings.loss(lost)

    def _look_at_processes(self, told_by: OutputProgress | Movement) -> None:
        try:
            monitors = self._start()
        except OSError:
            told_by.not_now(time.monotonic())
            return
        try:
            self._judge(monitors, told_by)
        except MonitorsEnded:  # as where Slurm starts no step: nothing is known
            told_by.not_now(time.monotonic())
        finally:
            monitors.end()

    def _judge(self, monitors: Monitors, told_by: OutputProgress | Movement) -> None:
        watched = Watched(self._nodes)
        first = self._looks(monitors, watched)
        began_s = time.monotonic()
        for _ in monitors.hear(self._between_s):
            pass
        second = self._looks(monitors, watched)
        self._read()
        now_s = time.monotonic()
        silent = [node for node in self._nodes if node not in second]
        looked = looked_at(second, silent=silent)
        judged = told_by.judge(
            watched,
            looked_at(first, silent=silent).then(looked),
            self._nodes,
            window_s=now_s - began_s,
            now_s=now_s,
        )
        latest = self._progress.latest
        if isinstance(judged, str):
            return
        if told_by is self._movement:
            self._findings.hang(*judged, at_rest=True)
        elif latest is not None:
            self._findings.hang(*judged, line=latest.line)

    @staticmethod
    def _looks(monitors: Monitors, watched: Watched) -> dict[str, NodeLook]:
        looks = {}
        for message in monitors.ask(LOOK):
            if isinstance(message, NodeLook):
                looks[message.node] = message
                watched.hear(message.node, message.now, time.monotonic())
        return looks
