# SPDX-License-Identifier: Apache-2.0
"""What is known of a run: the fold of its journal.

The same entries give the same state, whatever the order in which the files of the journal were
read, so a master that died is replaced by one that folds the journal and goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_health.core.gpu_load import Burn
from slurm_health.core.localize.settings import Device
from slurm_health.core.record_codec import Entry
from slurm_health.core.records import (
    ActionDone,
    ActionIntended,
    AgentEnded,
    AgentsLaunched,
    AgentsLost,
    AgentStarted,
    DevicesWatched,
    Figure,
    GroupAborted,
    LossCause,
    MasterResumed,
    NodeReported,
    NodesAdmitted,
    RoundEnded,
    RoundStarted,
    RunFinished,
    RunStarted,
    Sampled,
    VerdictReached,
    WorkersFailed,
    WorkersReady,
    WorkersStarting,
)
from slurm_health.core.session.measurement import group_result
from slurm_health.core.verdict import GroupResult, Outcome

_AgentRecord = AgentStarted | WorkersStarting | WorkersReady | WorkersFailed | AgentEnded


@dataclass
class NodeState:
    """What is known of one node's agent.

    `launches` counts how often it was started by this master, `failed_starts` how often Slurm
    could not. `lost` and `failed` say why the agent or its workers are of no use.
    """

    launches: int = 0
    launch: int = -1
    launched_s: float = 0.0
    started: AgentStarted | None = None
    ready: WorkersReady | None = None
    ready_s: float = 0.0
    lost: str = ""
    lost_s: float = 0.0
    failed: str = ""
    failed_starts: int = 0
    no_journal: bool = False

    @property
    def gone(self) -> bool:
        """Whether nothing more is to be expected of the agent."""
        return bool(self.lost or self.failed)

    @property
    def usable(self) -> bool:
        """Whether the node can take part in a round now."""
        return self.ready is not None and not self.gone

    @property
    def pending(self) -> bool:
        """Whether the node may yet become usable."""
        return not self.usable and not self.gone


@dataclass
class RoundState:
    """The round in progress. `aborted` holds the record and the time of each abort."""

    record: RoundStarted
    started_s: float
    aborted: dict[tuple[str, ...], tuple[GroupAborted, float]] = field(default_factory=dict)
    void: bool = False

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The groups as planned."""
        return [tuple(group) for group in self.record.groups]

    def runs(self, group: tuple[str, ...]) -> bool:
        """Tell whether the group began: a group with an absent member does not."""
        return not set(self.record.absent).intersection(group)


class RunState:
    """The fold of one run's journal. Reading it changes nothing."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.agents = {node: NodeState() for node in nodes}
        self.launches = 0
        self.admitted: tuple[str, ...] | None = None
        self.leaves: dict[str, list[str]] = {}
        self.started: RunStarted | None = None
        self.round: RoundState | None = None
        self.ended: list[tuple[int, list[GroupResult]]] = []
        self.verdict: VerdictReached | None = None
        self.finished: RunFinished | None = None
        self.intended: list[ActionIntended] = []
        self.done: list[ActionDone] = []
        self._reports: defaultdict[int, dict[str, NodeReported]] = defaultdict(dict)
        self._samples: defaultdict[int, list[Sampled]] = defaultdict(list)
        # By node and launch, because a node's file may be read before the master's.
        self._words: defaultdict[tuple[str, int], list[tuple[_AgentRecord, float]]]
        self._words = defaultdict(list)
        self.burns: defaultdict[str, list[Burn]] = defaultdict(list)
        self._model_of: dict[str, str] = {}
        self._backend_of: dict[str, str] = {}
        self._ended_ms: defaultdict[str, list[float]] = defaultdict(list)

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes of the run, in order."""
        return tuple(self.agents)

    def reports(self, round_index: int) -> Mapping[str, NodeReported]:
        """Return each node's last word on a round, as far as it is known."""
        return self._reports[round_index]

    def measured_ms(self, phase: str) -> list[float]:
        """Return how long each measured group of a phase took, for the deadlines of the others."""
        ended_ms = self._ended_ms[phase]
        if self.round is None:
            return ended_ms
        reports = self._reports[self.round.record.round]
        return ended_ms + _durations_ms(self.round.groups, reports)

    def fold(self, entry: Entry) -> None:
        """Take in one journal entry, of any writer."""
        match entry.record:
            case RoundStarted() | GroupAborted() | RoundEnded() as record:
                self._fold_round(record, entry.time_s)
            case (
                AgentStarted() | WorkersStarting() | WorkersReady() | WorkersFailed() | AgentEnded()
            ) as record:
                self._fold_agent(record, entry.time_s)
            case Sampled() as record:
                if record.node not in self._reports[record.round]:  # that was its last word
                    self._samples[record.round].append(record)
            case NodeReported() as record:
                self._reports[record.round].setdefault(record.node, record)
            case AgentsLaunched() as record:
                self._fold_launch(record, entry.time_s)
            case AgentsLost() as record:
                self._fold_loss(record, entry.time_s)
            case DevicesWatched(node=node, devices=devices):
                self.burns[node].extend(devices)
            case _:
                self._fold_milestone(entry)

    def _fold_milestone(self, entry: Entry) -> None:
        match entry.record:
            case RunStarted() as record:
                self.started = record
            case NodesAdmitted(nodes=nodes, leaves=leaves):
                self.admitted = tuple(nodes)
                self.leaves = leaves
            case MasterResumed():
                self._fold_resume()
            case VerdictReached() as record:
                self.verdict = record
            case ActionIntended() as record:
                self.intended.append(record)
            case ActionDone() as record:
                self.done.append(record)
            case RunFinished() as record:
                self.finished = record
            case _:
                pass

    def _fold_launch(self, record: AgentsLaunched, time_s: float) -> None:
        self.launches = max(self.launches, record.launch + 1)
        for name in record.nodes:
            node = self.agents[name]
            node.launches += 1
            node.launch, node.launched_s = record.launch, time_s
            node.started = node.ready = None
            node.lost = node.failed = ""
            node.no_journal = False
            for word, said_s in self._words[name, record.launch]:
                _heed(node, word, said_s)

    def _fold_resume(self) -> None:
        for name, node in self.agents.items():
            if self.admitted is not None and name not in self.admitted:
                continue  # it takes no part any more, and what is known of it stays true
            node.launches = 0
            node.lost = node.lost or "its master died"
        if self.round is not None:
            self.round.void = True

    def _fold_loss(self, record: AgentsLost, time_s: float) -> None:
        for name in record.nodes:
            node = self.agents.get(name)
            if node is None or node.launch != record.launch:
                continue
            if record.cause is LossCause.NO_JOURNAL:
                node.failed = record.reason  # the next agent would see no more
                node.no_journal = True
            else:
                node.lost, node.lost_s = record.reason, time_s
                node.failed_starts += record.cause is LossCause.NOT_STARTED

    def _fold_agent(self, record: _AgentRecord, time_s: float) -> None:
        self._words[record.node, record.launch].append((record, time_s))
        if isinstance(record, WorkersReady):
            self._backend_of.setdefault(record.node, record.backend)
            if record.model:
                self._model_of.setdefault(record.node, record.model)
        node = self.agents.get(record.node)
        if node is None or node.launch != record.launch:
            return  # an agent of an earlier launch that has not noticed yet
        _heed(node, record, time_s)

    def _fold_round(self, record: RoundStarted | GroupAborted | RoundEnded, time_s: float) -> None:
        if isinstance(record, RoundStarted):
            self.round = RoundState(record=record, started_s=time_s)
        elif self.round is None or record.round != self.round.record.round:
            return
        elif isinstance(record, GroupAborted):
            self.round.aborted[tuple(record.group)] = (record, time_s)
        else:
            self.ended.append((record.round, self._results(self.round, record)))
            self.round = None

    def _results(self, current: RoundState, record: RoundEnded) -> list[GroupResult]:
        """Put the round together from what stands in the journal whatever its reading order.

        A report that came after the end of its round is that of a silent node: it does not count.
        """
        silent = set(record.silent)
        reports = self._reports[record.round]
        answered = {} if record.void else {n: r for n, r in reports.items() if n not in silent}
        self._ended_ms[current.record.phase] += _durations_ms(current.groups, answered)
        samples = [sample for sample in self._samples[record.round] if sample.node in answered]
        results = []
        known = self.models()
        models = known if len(set(known.values())) > 1 else {}
        for group in current.groups:
            abort = current.aborted.get(group)
            results.append(
                group_result(
                    group,
                    [sample for sample in samples if sample.node in group],
                    answered,
                    silent=silent,
                    timed_out=abort is not None and abort[0].timed_out,
                    models=models,
                )
            )
        return results

    def models(self) -> dict[str, str]:
        """Return what each admitted node computes with, as far as it is known."""
        compared = self.admitted or ()
        return {name: self._model_of[name] for name in compared if name in self._model_of}

    def device(self) -> Device:
        """Return what kind of device the admitted nodes compute with."""
        known = {self._backend_of.get(name) for name in self.admitted or ()} - {None}
        return Device.CPU if known == {"gloo"} else Device.ACCELERATOR

    def figures(self, probe: str, nodes: Sequence[str]) -> list[Mapping[str, Figure]]:
        """Return the figures that a probe gave on these nodes, in all rounds."""
        return [
            sample.figures
            for samples in self._samples.values()
            for sample in samples
            if sample.probe == probe and sample.node in nodes
        ]


def _heed(node: NodeState, record: _AgentRecord, time_s: float) -> None:
    match record:
        case AgentStarted():
            node.started = record
        case WorkersStarting():
            node.ready = None
        case WorkersReady():
            node.ready, node.ready_s = record, time_s
        case WorkersFailed(reason=reason):
            node.failed = reason
        case AgentEnded(reason=reason):
            node.lost = node.lost or f"its agent left: {reason}"


def _durations_ms(
    groups: Iterable[tuple[str, ...]], reports: Mapping[str, NodeReported]
) -> list[float]:
    found = []
    for group in groups:
        members = [reports.get(node) for node in group]
        measured = [r for r in members if r is not None and r.outcome is Outcome.MEASURED]
        if measured and len(measured) == len(group):
            found.append(max(report.elapsed_ms for report in measured))
    return found
