# SPDX-License-Identifier: Apache-2.0
"""The state machine of one check: fold what the journal says, say what the master does next.

`Session` holds no clock and touches nothing. The same entries in the same order give the same
state, so a master that died is replaced by one that folds the journal and goes on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from slurm_health.core.conclusion import judged, unmeasured
from slurm_health.core.measurement import group_result
from slurm_health.core.records import (
    ActionDone,
    ActionIntended,
    AgentEnded,
    AgentsLaunched,
    AgentsLost,
    AgentStarted,
    Entry,
    GroupAborted,
    MasterResumed,
    NodeReported,
    NodesAdmitted,
    Record,
    Rendezvous,
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
from slurm_health.core.verdict import GroupResult, NodeVerdict, Outcome, Round, Verdict


class Localizer(Protocol):
    """What the session needs of `slurm_health.core.localize.Localizer`."""

    def next_round(self) -> Round | None:
        """Plan the next round, None when enough is known."""

    def observe(self, index: int, results: Sequence[GroupResult]) -> None:
        """Take in a round's results."""

    def verdict(self) -> Verdict:
        """Conclude."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long the session waits. Every wait is measured from a record of the master's.

    A round's deadline adapts once half of its groups have reported: `adaptive_factor` times the
    median of what groups took, plus `adaptive_extra_s`. Before that, and while nothing was
    measured, `round_deadline_s` holds.
    """

    gather_s: float = 20.0
    round_deadline_s: float = 60.0
    adaptive_factor: float = 4.0
    adaptive_extra_s: float = 4.0
    abort_grace_s: float = 5.0
    launches_per_node: int = 3
    failed_starts_per_node: int = 2


@dataclass(frozen=True, kw_only=True)
class Append:
    """Write this record; nothing else."""

    record: Record


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Write this record, then start an agent on each of its nodes."""

    record: AgentsLaunched


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing to do before `until_s`, unless the journal says more. `reason` says for what."""

    until_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Conclude:
    """The verdict stands; act on it."""


Step = Append | Launch | Wait | Conclude


@dataclass
class _Node:
    """What is known of one node's agent."""

    launches: int = 0
    launch: int = -1
    launched_s: float = 0.0
    started: AgentStarted | None = None
    ready: WorkersReady | None = None
    ready_s: float = 0.0
    lost: str = ""
    failed: str = ""
    failed_starts: int = 0

    @property
    def usable(self) -> bool:
        return self.ready is not None and not self.gone

    @property
    def gone(self) -> bool:
        return bool(self.lost or self.failed)


@dataclass
class _Round:
    """The round in progress."""

    record: RoundStarted
    started_s: float
    aborted: dict[tuple[str, ...], tuple[GroupAborted, float]] = field(default_factory=dict)
    void: bool = False

    @property
    def groups(self) -> list[tuple[str, ...]]:
        return [tuple(group) for group in self.record.groups]

    @property
    def absent(self) -> frozenset[str]:
        return frozenset(self.record.absent)

    def starts(self, group: tuple[str, ...]) -> bool:
        """Tell whether the group runs: a group with an absent member does not."""
        return not self.absent.intersection(group)


class Session:
    """One check, from launch to verdict."""

    def __init__(
        self,
        nodes: Sequence[str],
        make_localizer: Callable[[Sequence[str]], Localizer],
        limits: Limits,
    ) -> None:
        self.nodes = tuple(nodes)
        self.limits = limits
        self.started: RunStarted | None = None
        self.verdict: VerdictReached | None = None
        self.finished: RunFinished | None = None
        self.intended: list[ActionIntended] = []
        self.done: list[ActionDone] = []
        self.rounds_ended = 0
        self._make_localizer = make_localizer
        self._agents = {node: _Node() for node in self.nodes}
        self._launches = 0
        self._localizer: Localizer | None = None
        self._admitted: tuple[str, ...] = ()
        self._round: _Round | None = None
        self._planned: Round | None = None
        self._waiting_since_s: float | None = None
        self._measured_ms: list[float] = []
        self._reports: defaultdict[int, dict[str, NodeReported]] = defaultdict(dict)
        self._samples: defaultdict[int, list[Sampled]] = defaultdict(list)

    # --- folding -----------------------------------------------------------------------------

    def fold(self, entry: Entry) -> None:
        """Take in one journal entry, of any writer."""
        match entry.record:
            case RunStarted() as record:
                self.started = record
            case AgentsLaunched() as record:
                self._fold_launch(record, entry.time_s)
            case NodesAdmitted(nodes=nodes):
                self._admitted = tuple(nodes)
                self._localizer = self._make_localizer(self._admitted)
            case RoundStarted() | GroupAborted() | RoundEnded() as record:
                self._fold_round(record, entry.time_s)
            case VerdictReached() as record:
                self.verdict = record
            case ActionIntended() as record:
                self.intended.append(record)
            case ActionDone() as record:
                self.done.append(record)
            case RunFinished() as record:
                self.finished = record
            case MasterResumed():
                self._fold_resume()
            case AgentsLost() as record:
                self._fold_loss(record)
            case _:
                self._fold_agent(entry)

    def _fold_launch(self, record: AgentsLaunched, time_s: float) -> None:
        self._launches = max(self._launches, record.launch + 1)
        for name in record.nodes:
            node = self._agents[name]
            node.launches += 1
            node.launch, node.launched_s = record.launch, time_s
            node.started = node.ready = None
            node.lost = node.failed = ""

    def _fold_resume(self) -> None:
        for node in self._agents.values():
            node.launches = 0
            node.lost = node.lost or "its master died"
        if self._round is not None:
            self._round.void = True

    def _fold_loss(self, record: AgentsLost) -> None:
        for name in record.nodes:
            node = self._agents.get(name)
            if node is None or node.launch != record.launch:
                continue
            node.lost = record.reason
            node.failed_starts += record.could_not_start

    def _fold_round(self, record: RoundStarted | GroupAborted | RoundEnded, time_s: float) -> None:
        if isinstance(record, RoundStarted):
            self._round = _Round(record=record, started_s=time_s)
            self._planned = self._waiting_since_s = None
        elif self._round is None or record.round != self._round.record.round:
            return
        elif isinstance(record, GroupAborted):
            self._round.aborted[tuple(record.group)] = (record, time_s)
        else:
            self._end_round(self._round, record)

    def _end_round(self, current: _Round, record: RoundEnded) -> None:
        self._round = None
        self.rounds_ended += 1
        # Only what stands in the journal whatever the order of its files: a report that came after
        # the end of its round is that of a silent node, and does not count.
        silent = set(record.silent)
        reports = self._reports[record.round]
        answered = {} if record.void else {n: r for n, r in reports.items() if n not in silent}
        results = []
        for group in current.groups:
            abort = current.aborted.get(group)
            results.append(
                group_result(
                    group,
                    [
                        s
                        for s in self._samples[record.round]
                        if s.node in group and s.node in answered
                    ],
                    answered,
                    silent=silent,
                    timed_out=abort is not None and abort[0].timed_out,
                )
            )
        assert self._localizer is not None
        self._localizer.observe(record.round, results)

    def _fold_agent(self, entry: Entry) -> None:
        record = entry.record
        match record:
            case (
                AgentStarted() | WorkersStarting() | WorkersReady() | WorkersFailed() | AgentEnded()
            ):
                node = self._agents.get(record.node)
                if node is None or node.launch != record.launch:
                    return  # an agent of an earlier launch that has not noticed yet
                self._fold_agent_state(node, record, entry.time_s)
            case Sampled():
                self._samples[record.round].append(record)
            case NodeReported():
                self._reports[record.round].setdefault(record.node, record)
                if self._round is not None and self._round.record.round == record.round:
                    self._note_duration(self._round, record)
            case _:
                pass

    def _fold_agent_state(
        self,
        node: _Node,
        record: AgentStarted | WorkersStarting | WorkersReady | WorkersFailed | AgentEnded,
        time_s: float,
    ) -> None:
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

    def _note_duration(self, current: _Round, record: NodeReported) -> None:
        group = next((group for group in current.groups if record.node in group), ())
        reports = [self._reports_of(current).get(node) for node in group]
        measured = [r for r in reports if r is not None and r.outcome is Outcome.MEASURED]
        if group and len(measured) == len(group):
            self._measured_ms.append(max(report.elapsed_ms for report in measured))

    # --- deciding ----------------------------------------------------------------------------

    def next_step(self, now_s: float) -> Step:
        """Say what to do now. `now_s` is the clock that stamps the master's records."""
        if self.verdict is not None:
            return Conclude()
        if self._round is not None:
            return self._step_in_round(self._round, now_s)
        relaunch = self._relaunch()
        if relaunch is not None:
            return relaunch
        if self._localizer is None:
            return self._step_before_rounds(now_s)
        if self._planned is None:
            self._planned = self._localizer.next_round()
            self._waiting_since_s = now_s
        if self._planned is None:
            return Append(record=judged(self.nodes, self._localizer.verdict(), self._unmeasured()))
        return self._step_to_round(self._planned, now_s)

    def _relaunch(self) -> Launch | None:
        """Start what was never started, and start again what was lost, within bounds.

        A node on which a step could not be started is tried apart from the others: one such node
        ends the whole step.
        """
        wanted = [
            name
            for name, node in self._agents.items()
            if (node.launches == 0 or node.lost)
            and node.launches < self.limits.launches_per_node
            and node.failed_starts < self.limits.failed_starts_per_node
            and (self._localizer is None or name in self._admitted)
        ]
        untainted = [name for name in wanted if not self._agents[name].failed_starts]
        nodes = untainted or wanted
        if not nodes:
            return None
        return Launch(record=AgentsLaunched(launch=self._launches, nodes=nodes))

    def _step_before_rounds(self, now_s: float) -> Step:
        pending = [name for name, node in self._agents.items() if not node.usable and not node.gone]
        if pending:
            until_s = self._gather_deadline_s()
            if now_s < until_s:
                return Wait(until_s=until_s, reason=f"{len(pending)} nodes to get ready")
        usable = [name for name in self.nodes if self._agents[name].usable]
        admitted = self._comparable(usable)
        if not admitted:
            return Append(record=judged(self.nodes, Verdict(nodes={}), self._unmeasured()))
        return Append(record=NodesAdmitted(nodes=admitted))

    def _gather_deadline_s(self) -> float:
        launched_s = max(node.launched_s for node in self._agents.values())
        took = [node.ready_s - node.launched_s for node in self._agents.values() if node.ready]
        usual_s = self.limits.adaptive_factor * median(took) if took else 0.0
        return launched_s + max(self.limits.gather_s, usual_s)

    def _comparable(self, usable: Sequence[str]) -> list[str]:
        """Keep the nodes that run the most common torch and backend."""
        stacks = {name: self._stack(name) for name in usable}
        if not stacks:
            return []
        common, _ = Counter(stacks.values()).most_common(1)[0]
        return [name for name in usable if stacks[name] == common]

    def _stack(self, name: str) -> tuple[str, str]:
        ready = self._agents[name].ready
        assert ready is not None
        return ready.torch, ready.backend

    def _step_to_round(self, planned: Round, now_s: float) -> Step:
        """Start the round once its nodes are ready, or once waiting longer is pointless."""
        members = [node for group in planned.groups for node in group]
        pending = [n for n in members if not self._agents[n].usable and not self._agents[n].gone]
        assert self._waiting_since_s is not None
        until_s = self._waiting_since_s + self.limits.gather_s
        if pending and now_s < until_s:
            return Wait(until_s=until_s, reason=f"workers of {len(pending)} nodes to come back")
        rendezvous = [self._rendezvous(group) for group in planned.groups]
        return Append(
            record=RoundStarted(
                round=planned.index,
                groups=[list(group) for group in planned.groups],
                rendezvous=rendezvous,
                deadline_s=self.limits.round_deadline_s,
                absent=[node for node in members if not self._agents[node].usable],
            )
        )

    def _rendezvous(self, group: Sequence[str]) -> Rendezvous:
        agents = [self._agents[node] for node in group]
        first = agents[0]
        if not all(agent.usable for agent in agents) or first.started is None or not first.ready:
            return Rendezvous(address="", port=0)
        return Rendezvous(address=first.started.address, port=first.ready.store_port)

    def _step_in_round(self, current: _Round, now_s: float) -> Step:
        if current.void:
            return Append(record=RoundEnded(round=current.record.round, void=True))
        deadline_s = self._round_deadline_s(current)
        wake_s = []
        for group in current.groups:
            if not self._awaited(current, group):
                continue
            if group in current.aborted:
                give_up_s = current.aborted[group][1] + self.limits.abort_grace_s
                if now_s < give_up_s:
                    wake_s.append(give_up_s)
                continue
            abort = self._abort(current, group, late=now_s >= deadline_s)
            if abort is not None:
                return Append(record=abort)
            wake_s.append(deadline_s)
        if wake_s:
            return Wait(until_s=min(wake_s), reason=f"round {current.record.round}")
        return Append(record=RoundEnded(round=current.record.round, silent=self._silent(current)))

    def _awaited(self, current: _Round, group: tuple[str, ...]) -> bool:
        """Tell whether a report of the group is still to come."""
        return current.starts(group) and any(
            not self._agents[node].gone for node in self._expected(current, group)
        )

    def _expected(self, current: _Round, group: tuple[str, ...]) -> list[str]:
        """Members whose report is still to come."""
        return [node for node in group if node not in self._reports_of(current)]

    def _abort(self, current: _Round, group: tuple[str, ...], *, late: bool) -> GroupAborted | None:
        """Tell the others to stop as soon as one member is known to have failed."""
        reason = ""
        for node in group:
            report = self._reports_of(current).get(node)
            if report is None and self._agents[node].gone:
                why = self._agents[node].lost or self._agents[node].failed
                reason = f"{node} is gone: {why}"
            elif report is not None and report.outcome is not Outcome.MEASURED:
                reason = f"{node} failed: {report.detail}"
        if reason or late:
            return GroupAborted(
                round=current.record.round,
                group=list(group),
                reason=reason or "the deadline of the round has passed",
                timed_out=not reason,
            )
        return None

    def _silent(self, current: _Round) -> list[str]:
        """Name the members nobody answered for: their group says nothing about the others."""
        return [
            node
            for group in current.groups
            for node in group
            if node in current.absent
            or (current.starts(group) and node not in self._reports_of(current))
        ]

    def _reports_of(self, current: _Round) -> Mapping[str, NodeReported]:
        return self._reports[current.record.round]

    def _round_deadline_s(self, current: _Round) -> float:
        limits = self.limits
        running = [group for group in current.groups if current.starts(group)]
        reported = [group for group in running if not self._expected(current, group)]
        if not self._measured_ms:
            return current.started_s + limits.round_deadline_s
        usual_s = median(self._measured_ms) / 1e3
        allowed_s = limits.adaptive_factor * usual_s + limits.adaptive_extra_s
        if 2 * len(reported) < len(running):
            allowed_s *= 2.5  # other rounds were quick, this one has shown nothing yet
        return current.started_s + min(allowed_s, limits.round_deadline_s)

    def _unmeasured(self) -> dict[str, NodeVerdict]:
        """Judge the nodes the Localizer never saw."""
        others_started = any(node.started for node in self._agents.values())
        verdicts = {}
        for name, node in self._agents.items():
            if name in self._admitted:
                continue
            stack = " ".join(self._stack(name)) if node.ready else ""
            verdicts[name] = unmeasured(
                could_not_start=node.failed_starts >= self.limits.failed_starts_per_node,
                others_started=others_started,
                lost=node.lost,
                failed=node.failed,
                started=node.started is not None,
                stack=stack,
            )
        return verdicts
