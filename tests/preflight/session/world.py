# SPDX-License-Identifier: Apache-2.0
"""A cluster that exists only as journal entries, for the controller to be driven through.

Anything may happen in it that can happen to a journal: agents that never start, end, stop
answering or come too late; lines written twice; lines of strangers.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from slurm_health.preflight.session.controller import Controller, Wait
from slurm_health.preflight.session.course import MakeLocalizer
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.phases import Phase
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import (
    AgentEnded,
    AgentsLaunched,
    AgentsLost,
    GroupAborted,
    LossCause,
    NodeReported,
    Record,
    RoundStarted,
    Sampled,
    WorkersFailed,
    WorkersStarting,
)
from slurm_health.records.verdict import Outcome
from tests.support.journals import run_started
from tests.support.session_story import QUICK, CountingLocalizer, ready, started

STRANGER = "stranger"
STEPS = 3000  # far more than any run of a few nodes needs


@dataclass(order=True)
class _Event:
    time_s: float
    number: int
    writer: str = field(compare=False)
    record: Record | None = field(compare=False)


class World:
    """Plays one check; `trouble` is how often something goes wrong, from 0 to 1."""

    def __init__(
        self,
        nodes: Sequence[str],
        random: Random,
        *,
        trouble: float,
        limits: TimeLimits,
        make_localizer: MakeLocalizer = CountingLocalizer,
        course: Sequence[Phase] = QUICK,
    ) -> None:
        self.nodes = tuple(nodes)
        self.master_log: list[Entry] = []
        self.node_logs: dict[str, list[Entry]] = {node: [] for node in nodes}
        self.now_s = 1000.0
        self.steps = 0
        self._random = random
        self._trouble = trouble
        self._limits = limits
        self._make_localizer = make_localizer
        self._course = course
        self._events: list[_Event] = []
        self._number = 0
        self._launch: dict[str, int] = {}
        self.controller = self.new_controller()

    def new_controller(self) -> Controller:
        return Controller(self.nodes, self._make_localizer, self._limits, self._course)

    def replayed(self, *, without: type[Record] | None = None) -> Controller:
        """Return a controller that has read the journal: the nodes' files first, in any order."""
        controller = self.new_controller()
        logs = list(self.node_logs.values())
        self._random.shuffle(logs)
        for log in [*logs, self.master_log]:
            for entry in log:
                if without is None or not isinstance(entry.record, without):
                    controller.state.fold(entry)
        return controller

    def play(self) -> Controller:
        self._master_says(run_started(self.nodes))
        while not self._step():
            self.steps += 1
            assert self.steps < STEPS, f"no end after {STEPS} steps at {self.now_s} s"
        return self.controller

    def _step(self) -> bool:
        step = self.controller.next_step(self.now_s)
        if isinstance(step, Wait):
            assert step.until_s > self.now_s, f"waits for the past: {step.reason}"
            assert step.reason
            self._wait(step.until_s)
            return False
        for record in step:
            self._master_says(record)
            self._react(record)
        return not step

    def _master_says(self, record: Record) -> None:
        entry = Entry(
            id=f"master:{len(self.master_log)}", time_s=self.now_s, kind="", record=record
        )
        self.master_log.append(entry)
        self.controller.state.fold(entry)

    # --- what nodes do ------------------------------------------------------------------------

    def _start_agent(self, node: str, launch: int) -> None:
        self._launch[node] = launch
        fate = self._random.random() if self._unlucky() else 1.0
        if fate < 0.15:
            self._lose(node, launch, LossCause.NOT_STARTED, 0.1)
            return
        if fate < 0.25:
            return  # nothing is ever heard of it
        self._later(0.2, node, started(node, launch))
        if fate < 0.35:
            self._lose(node, launch, LossCause.NO_JOURNAL, 1.0)
        elif fate < 0.45:
            self._later(1.0, node, WorkersFailed(node=node, launch=launch, reason="no torch"))
        elif fate < 0.5:
            self._later(1.0, node, _device_failed(node, launch))
        elif fate < 0.6:
            self._later(0.9, node, AgentEnded(node=node, launch=launch, reason="bored"))
            self._lose(node, launch, LossCause.ENDED, 1.0)
        elif fate >= 0.7:
            torch = "2.4" if fate >= 0.8 else "1.13"
            self._later(self._random.uniform(0.5, 3.0), node, ready(node, launch, torch))
            if fate < 0.9:
                self._lose(node, launch, LossCause.ENDED, self._random.uniform(1.0, 30.0))

    def _react(self, record: Record) -> None:
        if isinstance(record, AgentsLaunched):
            assert record.nodes
            for node in record.nodes:
                self._start_agent(node, record.launch)
        elif isinstance(record, RoundStarted):
            for group in record.groups:
                if not set(group) & set(record.absent):
                    self._run_group(record.round, group)
        elif isinstance(record, GroupAborted):
            for node in record.group:
                if not (self._unlucky() and self._random.random() < 0.5):
                    outcome = Outcome.TIMED_OUT if record.timed_out else Outcome.NOT_RUN
                    self._later(0.3, node, _reported(node, record.round, outcome))

    def _run_group(self, index: int, group: Sequence[str]) -> None:
        took_s = self._random.uniform(0.5, 2.0)
        fate = self._random.random() if self._unlucky() else 1.0
        victim = self._random.choice(list(group))
        if fate < 0.2:
            self._later(took_s, victim, _reported(victim, index, Outcome.FAILED, crashed=True))
            if self._random.random() < 0.5:
                self._replace_workers(victim, took_s)
            return
        if fate < 0.4:
            self._lose(victim, self._launch.get(victim, 0), LossCause.ENDED, took_s)
            return
        if fate < 0.6:
            return  # a hang: nobody says anything unless told to stop
        for node in group:
            sample = _sampled(node, index, group, self._random)
            report = _reported(node, index, Outcome.MEASURED, took_s=took_s)
            self._later(took_s, node, sample, report)

    def _replace_workers(self, node: str, after_s: float) -> None:
        launch = self._launch.get(node, 0)
        self._later(after_s, node, WorkersStarting(node=node, launch=launch))
        if not (self._unlucky() and self._random.random() < 0.3):
            self._later(after_s + 1.0, node, ready(node, launch, "2.4"))

    def _unlucky(self) -> bool:
        return self._random.random() < self._trouble

    # --- how it becomes known -----------------------------------------------------------------

    def _lose(self, node: str, launch: int, cause: LossCause, after_s: float) -> None:
        lost = AgentsLost(launch=launch, nodes=[node], reason=cause.value, cause=cause)
        self._later(after_s, "master", lost)

    def _later(self, after_s: float, writer: str, *records: Record) -> None:
        """Let a writer append records, in this order, now or much too late."""
        if self._unlucky() and self._random.random() < 0.2:
            after_s += self._random.uniform(0.0, 100.0)
        for record in records:
            self._push(after_s, writer, record)
        if writer != "master" and self._unlucky():
            self._push(after_s + self._random.uniform(0.0, 5.0), writer, records[-1])  # twice
            self._push(after_s, writer, self._foreign(writer))

    def _push(self, after_s: float, writer: str, record: Record | None) -> None:
        self._number += 1
        heapq.heappush(self._events, _Event(self.now_s + after_s, self._number, writer, record))

    def _foreign(self, node: str) -> Record | None:
        index = self._random.randrange(5)
        return self._random.choice(
            [
                None,
                _reported(STRANGER, index, Outcome.FAILED, crashed=True),
                _reported(node, 99, Outcome.FAILED, crashed=True),
                _sampled(STRANGER, index, [STRANGER], self._random),
                ready(node, 99, "2.4"),
                ready(STRANGER, 0, "2.4"),
                AgentEnded(node=node, launch=99, reason="of another run"),
            ]
        )

    def _wait(self, until_s: float) -> None:
        if not self._events or self._events[0].time_s > until_s:
            self.now_s = until_s
            return
        event = heapq.heappop(self._events)
        self.now_s = max(self.now_s, event.time_s)
        if event.writer == "master":
            assert event.record is not None
            self._master_says(event.record)
            return
        log = self.node_logs[event.writer]
        entry_id = f"{event.writer}:{len(log)}"
        log.append(Entry(id=entry_id, time_s=self.now_s, kind="", record=event.record))
        self.controller.state.fold(log[-1])


def _device_failed(node: str, launch: int) -> WorkersFailed:
    return WorkersFailed(
        node=node, launch=launch, reason="device 0 is lost", device_failed=True, torch="2.4"
    )


def _reported(
    node: str, index: int, outcome: Outcome, *, crashed: bool = False, took_s: float = 1.0
) -> NodeReported:
    return NodeReported(
        node=node, round=index, outcome=outcome, crashed=crashed, elapsed_ms=took_s * 1e3
    )


def _sampled(node: str, index: int, group: Sequence[str], random: Random) -> Sampled:
    return Sampled(
        node=node,
        round=index,
        group=list(group),
        probe="matmul",
        iteration_ms=[[random.uniform(2.9, 3.1)]],
    )
