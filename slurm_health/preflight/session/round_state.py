# SPDX-License-Identifier: Apache-2.0
"""What is known of the round in progress.

And what is known of one node's agent and its workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_health.records import records
from slurm_health.records.records import GroupAborted, NodeReported, RoundStarted
from slurm_health.records.verdict import Outcome

# What an agent says of itself.
AgentRecord = (
    records.AgentStarted
    | records.WorkersStarting
    | records.WorkersReady
    | records.WorkersFailed
    | records.DevicesUnopened
    | records.AgentEnded
)


@dataclass
class RoundState:
    """The round in progress.

    `agents` are all of the run, `reports` what nodes said last about this round. `aborted` holds
    the record and the time of each abort. Whoever changes what is known of a node says so to
    `look_again_at`, so that a step costs what is new and not all groups.
    """

    record: RoundStarted
    started_s: float
    agents: Mapping[str, NodeState]
    reports: Mapping[str, NodeReported]
    aborted: dict[tuple[str, ...], tuple[GroupAborted, float]] = field(default_factory=dict)
    void: bool = False

    def __post_init__(self) -> None:
        self._absent = frozenset(self.record.absent)
        self.groups = [tuple(group) for group in self.record.groups]  # as planned
        self.running = sum(self.runs(group) for group in self.groups)  # how many began
        self._group_of = {node: group for group in self.groups for node in group}
        self._stale = dict.fromkeys(self.groups)
        self._awaited: dict[tuple[str, ...], str] = {}
        self._reported: set[tuple[str, ...]] = set()
        self._measured_ms: dict[tuple[str, ...], float] = {}

    def look_again_at(self, nodes: Iterable[str]) -> None:
        """Take it that more is known of these nodes than before."""
        groups = (self._group_of.get(node) for node in nodes)
        self._stale.update((group, None) for group in groups if group is not None)

    @property
    def awaited(self) -> Mapping[tuple[str, ...], str]:
        """The groups of which a report may still come, and what is known to have failed in each."""
        self._look_again()
        return self._awaited

    @property
    def reported(self) -> int:
        """How many of the groups that began have reported."""
        self._look_again()
        return len(self._reported)

    @property
    def took_ms(self) -> Iterable[float]:
        """How long each group took of which every member has measured."""
        self._look_again()
        return self._measured_ms.values()

    def _look_again(self) -> None:
        stale, self._stale = self._stale, {}
        for group in stale:
            if self.awaits(group):
                self._awaited[group] = self.failure(group)
            else:
                self._awaited.pop(group, None)
            if self.runs(group) and not self.unreported(group):
                self._reported.add(group)
            elapsed_ms = _measured_ms(group, self.reports)
            if elapsed_ms is not None:
                self._measured_ms[group] = elapsed_ms

    def runs(self, group: tuple[str, ...]) -> bool:
        """Tell whether the group began: a group with an absent member does not."""
        return self._absent.isdisjoint(group)

    def unreported(self, group: tuple[str, ...]) -> list[str]:
        """Return the members whose report is still to come."""
        return [node for node in group if node not in self.reports]

    def awaits(self, group: tuple[str, ...]) -> bool:
        """Tell whether a report of the group may still come."""
        return self.runs(group) and any(
            not self.agents[node].gone for node in self.unreported(group)
        )

    def failure(self, group: tuple[str, ...]) -> str:
        """Say which member is known to have failed, and how; empty while none is."""
        why = ""
        for node in group:
            agent, report = self.agents[node], self.reports.get(node)
            if report is None and agent.gone:
                why = f"{node} is gone: {agent.lost or agent.failed}"
            elif report is not None and report.outcome is not Outcome.MEASURED:
                own = report.crashed or report.wrong_results
                why = f"{node} {'failed' if own else 'reports'}: {report.detail}"
        return why

    def silent(self) -> list[str]:
        """Name the members nobody answered for: their group says nothing about the others."""
        return [
            node
            for group in self.groups
            for node in group
            if node in self.record.absent or (self.runs(group) and node not in self.reports)
        ]

    def measured_ms(self, reports: Mapping[str, NodeReported]) -> list[float]:
        """Return how long each group took of which every member measured, by these reports."""
        elapsed = (_measured_ms(group, reports) for group in self.groups)
        return [elapsed_ms for elapsed_ms in elapsed if elapsed_ms is not None]


def _measured_ms(group: Sequence[str], reports: Mapping[str, NodeReported]) -> float | None:
    """Return how long a group took, None where not every member has measured."""
    longest_ms: float | None = None
    for node in group:
        report = reports.get(node)
        if report is None or report.outcome is not Outcome.MEASURED:
            return None
        longest_ms = max(report.elapsed_ms, longest_ms or 0.0)
    return longest_ms


@dataclass(frozen=True, kw_only=True)
class DeviceFailure:
    """What the devices of a node did instead of being opened, by a process with this `torch`.

    `late`: they had only not been opened yet.
    """

    words: str
    torch: str
    late: bool = False


@dataclass
class NodeState:
    """What is known of one node's agent.

    `launches` counts how often it was started by this master, `failed_starts` how often Slurm
    could not. `lost` and `failed` say why the agent or its workers are of no use, `device_failure`
    that this is because of its devices, `no_torch` that its interpreter lacks that, on a node with
    so many `accelerators`.
    """

    launches: int = 0
    launch: int = -1
    launched_s: float = 0.0
    started: records.AgentStarted | None = None
    ready: records.WorkersReady | None = None
    lost: str = ""
    lost_s: float = 0.0
    failed: str = ""
    device_failure: DeviceFailure | None = None
    no_torch: bool = False
    accelerators: int = 0
    failed_starts: int = 0
    no_journal: bool = False
    job_ended: bool = False

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

    @property
    def driver_keeps_state(self) -> bool:
        """Whether the driver of its devices is known to stay initialised between processes."""
        return self.started is not None and self.started.driver_keeps_state

    def begin(self, launch: int, time_s: float) -> None:
        """Forget what was said of an earlier agent: a new one has been started."""
        self.launches += 1
        self.launch, self.launched_s = launch, time_s
        self.started = self.ready = None
        self.lost = self.failed = ""
        self.no_journal = self.job_ended = self.no_torch = False
        self.device_failure = None

    def lose(self, cause: records.LossCause, reason: str, time_s: float) -> None:
        """Take it that the agent is gone."""
        if cause in (records.LossCause.NO_JOURNAL, records.LossCause.JOB_ENDED):
            self.failed = reason  # the next agent would fare no better
            self.no_journal = cause is records.LossCause.NO_JOURNAL
            self.job_ended = cause is records.LossCause.JOB_ENDED
        else:
            self.lost, self.lost_s = reason, time_s
            self.failed_starts += cause is records.LossCause.NOT_STARTED

    def heed(self, record: AgentRecord) -> None:
        """Take in what the agent of the current launch says."""
        match record:
            case records.AgentStarted():
                self.started = record
            case records.WorkersStarting():
                self.ready = None
                self.device_failure = None
            case records.WorkersReady():
                self.ready = record
                self.device_failure = None
            case records.DevicesUnopened(devices=devices, waited_s=waited_s, torch=torch):
                numbers = ", ".join(str(device) for device in devices)
                several = "s" if len(devices) > 1 else ""
                words = f"device{several} {numbers} not opened within {waited_s:.0f} s"
                self.device_failure = DeviceFailure(words=words, torch=torch, late=True)
            case records.WorkersFailed(reason=reason, device_failed=device_failed, torch=torch):
                self.failed = reason
                self.no_torch, self.accelerators = record.no_torch, record.accelerators
                if device_failed:
                    self.device_failure = DeviceFailure(words=f"{reason}, twice", torch=torch)
            case records.AgentEnded(reason=reason):
                self.lost = self.lost or f"its agent left: {reason}"


def on_cpus(ready: Iterable[records.WorkersReady]) -> bool:
    """Tell whether these workers compute with CPUs."""
    return all(each.on_cpus for each in ready)
