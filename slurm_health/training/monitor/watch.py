# SPDX-License-Identifier: Apache-2.0
"""The watch on the batch host, which says where a training hangs.

It hears the monitors of all nodes. Of a training without a heartbeat it follows the output, and how
the ranks here move: then nothing is started beside the job until lines that counted steps have
stayed away for far longer than they did before, or the main threads of all ranks of this node have.
Then monitors look at the processes of all nodes for some seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from slurm_health.records.script_records import ProgressSeen
from slurm_health.training.diagnosis.by_movement import Movement
from slurm_health.training.diagnosis.by_output import OutputProgress
from slurm_health.training.diagnosis.pace import PATIENCE, HangPatience
from slurm_health.training.diagnosis.rank_now import RankNow
from slurm_health.training.diagnosis.seen import STOPPED
from slurm_health.training.diagnosis.slow_steps import Longer, Slowdown, speeds_of
from slurm_health.training.diagnosis.watched import Program, WatchedPrograms
from slurm_health.training.monitor.findings import WatchFindings
from slurm_health.training.monitor.messages import HERE, LOOK, NOW, NodeLook, NodeMessage, looked_at
from slurm_health.training.monitor.monitors import Monitors, MonitorsEnded
from slurm_health.training.monitor.output_files import Tails

_TICK_S = 5.0
_HERE_S = 10.0
_WINDOW_S = 20.0  # of the comparison of ranks with each other, and of steps with earlier ones
_PATHS_S = 15.0  # some steps of which each takes seconds
# Between two looks, in which a process that works is seen to: with a heartbeat, and without one.
_BETWEEN_S = 4.0
_SILENT_BETWEEN_S = 10.0
_RECORD_S = 60.0  # from one record of the progress to the next: 250 kB a day
_MOST_STOPPED = 64  # that are named


class Watch:
    """Hears the monitors, and looks closer at a training that stands still.

    Args:
        monitors: of all nodes.
        nodes: those of the job.
        findings: says and records what is found.
        patience: what a standstill is measured against.
    """

    def __init__(
        self,
        monitors: Monitors,
        nodes: Sequence[str],
        findings: WatchFindings,
        *,
        patience: HangPatience = PATIENCE,
    ) -> None:
        self._monitors = monitors
        self._nodes = tuple(nodes)
        self._findings = findings
        self._watched = WatchedPrograms(nodes, patience)
        self._here_s = self._window_s = time.monotonic()

    def run(self) -> None:
        """Watch.

        Raises:
            Ended: the script has ended.
            MonitorsEnded: nothing can be watched any more.
            ScriptToEnd: the script hangs, and is to be ended.
        """
        while True:
            self._hear(_TICK_S)
            now_s = time.monotonic()
            if now_s - self._here_s >= _HERE_S:
                self._here_s = now_s
                self._monitors.tell(HERE)
            if now_s - self._window_s >= _WINDOW_S:
                self._window_s = now_s
                for slow, ratio in self._watched.window():
                    self._findings.slow_rank(slow, ratio)
                for uneven in self._watched.uneven():
                    self._findings.uneven(uneven)
                for _, longer in self._watched.slower():
                    self._look_at_paths(longer)
            suspect = self._watched.suspect(now_s)
            if suspect is not None:
                self._look_at(suspect)

    def _hear(self, wait_s: float) -> None:
        for message in self._monitors.hear(wait_s):
            self._take(message)

    def _take(self, message: NodeMessage) -> None:
        now = message.now if isinstance(message, NodeLook) else message.ranks
        now_s = time.monotonic()
        for program in self._watched.hear(message.node, now, now_s):
            self._name_end(program, now_s)

    def _look_at(self, program: Program) -> None:
        """See what the ranks of a program do, twice; say where it hangs, if it does."""
        looked = self._look()
        began_s = time.monotonic()
        self._hear(_BETWEEN_S)
        heard = set()
        for message in self._monitors.ask(NOW):
            self._take(message)
            heard.add(message.node)
        now_s = time.monotonic()
        judged = self._watched.judge(
            program,
            looked_at(looked, silent=[n for n in self._nodes if n not in {*looked, *heard}]),
            window_s=now_s - began_s,
            now_s=now_s,
        )
        if isinstance(judged, str):
            return
        self._findings.hang(*judged)

    def _look(self) -> dict[str, NodeLook]:
        """Return what each node sees that answers in time."""
        looked: dict[str, NodeLook] = {}
        for message in self._monitors.ask(LOOK):
            self._take(message)
            if isinstance(message, NodeLook):
                looked[message.node] = message
        return looked

    def _look_at_paths(self, longer: Longer) -> None:
        """See how fast connections are, for a while; say which are slow, if that explains it."""
        before = self._look()
        self._hear(_PATHS_S)
        after = self._look()
        addresses = {address: node for node, each in after.items() for address in each.addresses}
        self._findings.slowdown(
            Slowdown(
                step_ms=round(longer.now.step_ms, 1),
                usual_ms=round(longer.usual.step_ms, 1),
                own_ms=round(longer.now.own_ms, 1),
                nodes=self._nodes,
                speeds=speeds_of(_sent(before), _sent(after), addresses, self._nodes),
            )
        )

    def _name_end(self, program: Program, now_s: float) -> None:
        assert program.hung_s is not None
        stalled_s = now_s - program.stalled_s(now_s) - program.hung_s
        program.hung_s = None
        self._findings.hang_over(stalled_s, program.step)


def _sent(looked: Mapping[str, NodeLook]) -> dict[str, dict[str, tuple[int, float]]]:
    return {node: each.sent for node, each in looked.items()}


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
        findings: WatchFindings,
        between_s: float = _SILENT_BETWEEN_S,
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
        watched = WatchedPrograms(self._nodes)
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
    def _looks(monitors: Monitors, watched: WatchedPrograms) -> dict[str, NodeLook]:
        looks = {}
        for message in monitors.ask(LOOK):
            if isinstance(message, NodeLook):
                looks[message.node] = message
                watched.hear(message.node, message.now, time.monotonic())
        return looks
