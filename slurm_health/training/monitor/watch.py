# SPDX-License-Identifier: Apache-2.0
"""The watch on the batch host: hears the monitors of all nodes, and says where a training hangs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from slurm_health.training.diagnosis.pace import PATIENCE, Patience
from slurm_health.training.diagnosis.slow_steps import Longer, Slowdown, speeds_of
from slurm_health.training.diagnosis.watched import Program, Watched
from slurm_health.training.monitor.findings import Findings
from slurm_health.training.monitor.messages import HERE, LOOK, NOW, Message, NodeLook, looked_at
from slurm_health.training.monitor.monitors import Monitors

_TICK_S = 5.0
_HERE_S = 10.0
_WINDOW_S = 20.0  # of the comparison of ranks with each other, and of steps with earlier ones
_PATHS_S = 15.0  # some steps of which each takes seconds
_BETWEEN_S = 4.0  # two looks, in which a process that works is seen to


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
        findings: Findings,
        *,
        patience: Patience = PATIENCE,
    ) -> None:
        self._monitors = monitors
        self._nodes = tuple(nodes)
        self._findings = findings
        self._watched = Watched(nodes, patience)
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

    def _take(self, message: Message) -> None:
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
