# SPDX-License-Identifier: Apache-2.0
"""A controller that is told what happens, second by second."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.preflight.session.controller import Controller, Step, Wait
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.phases import Phase, phases
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import (
    AgentsLaunched,
    AgentStarted,
    NodeReported,
    NodesAdmitted,
    Record,
    RoundEnded,
    RoundStarted,
    VerdictReached,
    WorkersReady,
)
from slurm_health.records.verdict import GroupResult, Level, NodeVerdict, Outcome, Round, Verdict

R = TypeVar("R", bound=Record)
START_S = 1000.0
LIMITS = TimeLimits(settle_s=0.5)
NODES = ("n1", "n2", "n3", "n4")
QUICK = phases(["quick"])


class CountingLocalizer:
    """Pairs neighbours for a few rounds; a node is well if everything it took part in was."""

    def __init__(
        self,
        nodes: Sequence[str],
        _topology: Mapping[str, Sequence[str]] | None = None,
        _settings: LocalizeSettings | None = None,
        rounds: int = 3,
    ) -> None:
        self._nodes = list(nodes)
        self._rounds = rounds
        self._results: list[Sequence[GroupResult]] = []

    def next_round(self) -> Round | None:
        turn = len(self._results)
        if turn == self._rounds:
            return None
        order = self._nodes[turn % len(self._nodes) :] + self._nodes[: turn % len(self._nodes)]
        pairs = tuple(tuple(order[at : at + 2]) for at in range(0, len(order), 2))
        return Round(index=turn, groups=pairs)

    def observe(self, index: int, results: Sequence[GroupResult]) -> None:
        planned = self.next_round()
        assert planned is not None
        assert index == planned.index
        assert [result.nodes for result in results] == list(planned.groups)
        self._results.append(results)

    def verdict(self) -> Verdict:
        return Verdict(nodes={node: self._of(node) for node in self._nodes})

    def _of(self, node: str) -> NodeVerdict:
        mine = [r for results in self._results for r in results if node in r.nodes]
        well = all(result.outcome is Outcome.MEASURED for result in mine)
        said = "; ".join(f"{r.outcome.value} {r.silent} {r.crashed} {_times(r)}" for r in mine)
        level = Level.HEALTHY if well else Level.INCONCLUSIVE
        return NodeVerdict(node=node, level=level, reason=said)


def _times(result: GroupResult) -> list[tuple[str, list[tuple[str, float]]]]:
    return sorted((str(metric), sorted(times.items())) for metric, times in result.node_ms.items())


class Story:
    """A controller that is told what happens, second by second."""

    def __init__(
        self,
        nodes: Sequence[str] = NODES,
        limits: TimeLimits = LIMITS,
        course: Sequence[Phase] = QUICK,
    ) -> None:
        self.controller = Controller(nodes, CountingLocalizer, limits, course)
        self.now_s = START_S

    def says(self, *records: Record, at_s: float | None = None) -> None:
        self.now_s = self.now_s if at_s is None else at_s
        for record in records:
            self.controller.state.fold(Entry(id="", time_s=self.now_s, kind="", record=record))

    def next(self, at_s: float | None = None) -> Step:
        self.now_s = self.now_s if at_s is None else at_s
        return self.controller.next_step(self.now_s)

    def waits(self, at_s: float | None = None) -> Wait:
        step = self.next(at_s)
        assert isinstance(step, Wait), step
        return step

    def writes(self, at_s: float | None = None) -> Record:
        """Expect the next step to write records, and take in the first of them."""
        step = self.next(at_s)
        assert isinstance(step, tuple), step
        self.says(step[0])
        return step[0]

    def does(self, kind: type[R], at_s: float | None = None) -> R:
        """Expect the next step to write records of a kind, and take in the first of them."""
        record = self.writes(at_s)
        assert isinstance(record, kind), record
        return record

    def relaunches(self) -> Record:
        """Expect agents to be launched again once no further losses are to be expected."""
        return self.does(AgentsLaunched, at_s=self.now_s + LIMITS.settle_s)

    def is_ready(self, *nodes: str, launch: int = 0, torch: str = "2.4") -> None:
        for node in nodes:
            self.says(started(node, launch), ready(node, launch, torch))

    def begins(self, **changes: object) -> NodesAdmitted:
        """Expect agents to be launched, and admitted as their workers are ready, changed so."""
        self.does(AgentsLaunched)
        for node in self.controller.state.nodes:
            self.says(started(node), replace(ready(node), **changes))
        return self.does(NodesAdmitted)

    def is_in_round(self) -> None:
        self.begins()
        self.does(RoundStarted)

    def measures(self, *nodes: str, rounds: int) -> None:
        for index in range(rounds):
            self.does(RoundStarted)
            self.says(*measured(*nodes, index=index))
            self.does(RoundEnded)

    def verdict(self) -> dict[str, tuple[Level, str]]:
        record = self.does(VerdictReached)
        return {node.node: (node.level, node.reason) for node in record.nodes}


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(1, count + 1)]


def started(node: str, launch: int = 0, leaf: str = "") -> AgentStarted:
    address = f"10.0.0.{node[1:]}"
    return AgentStarted(node=node, launch=launch, hostname=node, address=address, leaf=leaf)


def ready(
    node: str, launch: int = 0, torch: str = "2.4", port: int = 4000, devices: int = 1
) -> WorkersReady:
    return WorkersReady(
        node=node,
        launch=launch,
        store_port=port,
        torch=torch,
        backend="gloo",
        devices=["cpu"] * devices,
        start_ms=1000.0,
    )


def measured(*nodes: str, index: int = 0, took_ms: float = 1000.0) -> list[NodeReported]:
    return [
        NodeReported(node=node, round=index, outcome=Outcome.MEASURED, elapsed_ms=took_ms)
        for node in nodes
    ]
