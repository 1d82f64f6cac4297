# SPDX-License-Identifier: Apache-2.0
"""What is known of a check: of its nodes, of the round in progress, and of those that ended.

All of it is folded from the records of the journal, in the order in which they were read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from slurm_health.preflight.expectations import Links
from slurm_health.preflight.localize.settings import DeviceKind
from slurm_health.preflight.session.measurement import group_result, group_times
from slurm_health.records import records
from slurm_health.records.gpu_load import Burn
from slurm_health.records.probe_catalog import STORAGE_NODES
from slurm_health.records.record_codec import Entry
from slurm_health.records.verdict import GroupResult, Outcome

# What an agent says of itself.
AgentRecord = (
    records.AgentStarted
    | records.WorkersStarting
    | records.WorkersReady
    | records.WorkersFailed
    | records.DevicesUnopened
    | records.AgentEnded
)
Group = tuple[str, ...]

# The probes that give a sample only where every result was the correct one.
_EXACT = frozenset({"values", "memory_pattern", "host_copy", "peer_copy"})


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

    `launches` counts how often it was started, `failed_starts` how often Slurm could not. `lost`
    and `failed` say why the agent or its workers are of no use, `device_failure` that this is
    because of its devices, `no_torch` that its interpreter lacks that, on a node with so many
    `accelerators`.
    """

    launches: int = 0
    launch: int = -1
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
        return self.ready is not None and not (self.lost or self.failed)

    @property
    def pending(self) -> bool:
        """Whether the node may yet become usable."""
        return self.ready is None and not (self.lost or self.failed)

    @property
    def driver_keeps_state(self) -> bool:
        """Whether the driver of its devices is known to stay initialised between processes."""
        return self.started is not None and self.started.driver_keeps_state

    def begin(self, launch: int) -> None:
        """Forget what was said of an earlier agent: a new one is being started."""
        self.launches += 1
        self.launch = launch
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

    def take(self, record: AgentRecord) -> None:
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
    return all(one.on_cpus for one in ready)


class RoundState:
    """The round in progress.

    `begun` are the groups all of whose members were there; `reports` is what nodes said last about
    it, `unreported` the nodes whose word is still to come. `reported` counts groups of which all
    members have reported, `took_ms` has how long those took that measured. `aborted` holds the
    record and the time of each abort.
    """

    def __init__(
        self,
        record: records.RoundStarted,
        started_s: float,
        agents: Mapping[str, NodeState],
        reports: dict[str, records.NodeReported],
    ) -> None:
        self.record = record
        self.started_s = started_s
        self.groups: list[Group] = [tuple(group) for group in record.groups]
        absent = frozenset(record.absent)
        self.begun = [group for group in self.groups if absent.isdisjoint(group)]
        self.reports = reports
        self._agents = agents
        self._group_of = {node: group for group in self.begun for node in group}
        self.unreported = dict.fromkeys(self._group_of)
        self.reported = 0
        self.took_ms: list[float] = []
        self.aborted: dict[Group, tuple[records.GroupAborted, float]] = {}
        self._failed: dict[Group, str] = {}
        for report in list(reports.values()):
            self.take(report)

    def take(self, report: records.NodeReported) -> None:
        """Take in a node's last word, which `reports` has by now."""
        if report.node not in self.unreported:
            return
        del self.unreported[report.node]
        group = self._group_of[report.node]
        if report.outcome is not Outcome.MEASURED:
            own = report.crashed or report.wrong_results
            self._failed[group] = f"{report.node} {'failed' if own else 'reports'}: {report.detail}"
        if not any(node in self.unreported for node in group):
            self.reported += 1
            if group not in self._failed:
                self.took_ms.append(max(self.reports[node].elapsed_ms for node in group))

    def awaited(self) -> dict[Group, str]:
        """Return the groups of which a report may still come, and what has failed in each."""
        failures, open_groups = dict(self._failed), {}
        for node in self.unreported:
            agent, group = self._agents[node], self._group_of[node]
            if agent.gone:
                failures[group] = f"{node} is gone: {agent.lost or agent.failed}"
            else:
                open_groups[group] = ""
        return {group: failures.get(group, "") for group in open_groups}

    def silent(self) -> list[str]:
        """Name the members nobody answered for: their group says nothing about the others."""
        absent = frozenset(self.record.absent)
        members = (node for group in self.groups for node in group)
        return [node for node in members if node in absent or node in self.unreported]


class CheckState:
    """The fold of one check's journal. Reading it changes nothing.

    `wrong_results` holds what nodes said of devices that computed wrongly, `exact` the nodes all of
    whose devices have computed correctly in a round, `did_not_connect` those whose devices NCCL was
    connecting when a deadline passed. `light` says why they measure with light probes, empty where
    they do with torch. `took_ms` is how long groups took, by phase. `storage_round` is the one
    that ordered the test of `storage_paths`, which are separated by commas.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self.agents = {node: NodeState() for node in nodes}
        self.launched_s = 0.0  # the last time
        self.launches = 0
        self.light = ""
        self.admitted: tuple[str, ...] | None = None
        self.leaves: dict[str, list[str]] = {}
        self.round: RoundState | None = None
        self.ended: list[list[GroupResult]] = []  # the results of rounds that have ended
        self.took_ms: defaultdict[str, list[float]] = defaultdict(list)
        self.verdict: records.VerdictReached | None = None
        self.finished: records.JobOutcome | None = None
        self.wrong_results: defaultdict[str, list[str]] = defaultdict(list)
        self.exact: set[str] = set()
        self.did_not_connect: set[str] = set()
        self.burns: defaultdict[str, list[Burn]] = defaultdict(list)
        self.storage: list[records.StorageTested] = []
        self.storage_round: RoundState | None = None
        self.storage_paths = ""
        self._reports: defaultdict[int, dict[str, records.NodeReported]] = defaultdict(dict)
        self._samples: defaultdict[int, dict[str, list[records.Sampled]]] = defaultdict(dict)
        # By node and launch, because a node's file may be read before the master's.
        self._early: defaultdict[tuple[str, int], list[AgentRecord]] = defaultdict(list)
        self._first_ready: dict[str, records.WorkersReady] = {}

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes of the run, in order."""
        return tuple(self.agents)

    def pending(self) -> list[str]:
        """Name the nodes that may yet become usable."""
        return [name for name, node in self.agents.items() if node.pending]

    def awaited(self) -> list[str]:
        """Name the nodes that the run waits for: of a round, or to get ready before one."""
        return [node for node in self.unreported() if not self.agents[node].gone]

    def unreported(self) -> list[str]:
        """Name the nodes that the run waits for, and those that went without a report.

        These may have written it just before.
        """
        if self.round is not None:
            return list(self.round.unreported)
        return list(dict.fromkeys([*self.pending(), *self.storage_pending()]))

    def storage_pending(self) -> list[str]:
        """Name the nodes whose test of storage has not been reported, and may yet be."""
        groups = self.storage_round.begun if self.storage_round else []
        tested = {test.node for test in self.storage}
        nodes = (node for group in groups for node in group)
        return [node for node in nodes if node not in tested and not self.agents[node].gone]

    def ready(self, nodes: Iterable[str]) -> list[records.WorkersReady]:
        """Return what those of these nodes said that have workers ready."""
        return [ready for node in nodes if (ready := self.agents[node].ready) is not None]

    def fold(self, entry: Entry) -> None:
        """Take in one journal entry, of any writer; one that names a stranger says nothing."""
        record, time_s = entry.record, entry.time_s
        if isinstance(record, records.Sampled | records.NodeReported):  # nearly all there are
            self._node_says(record)
            return
        if not self.agents.keys() >= {*_named(record)}:
            return
        match record:
            case records.RunStarted(settings=settings):
                self.storage_paths = str(settings.get("paths", ""))
            case records.AgentsLaunched():
                self._launched(record, time_s)
            case records.AgentsLost():
                self._lost(record, time_s)
            case (
                records.AgentStarted()
                | records.WorkersStarting()
                | records.WorkersReady()
                | records.WorkersFailed()
                | records.DevicesUnopened()
                | records.AgentEnded()
            ):
                self._agent_says(record)
            case records.NodesAdmitted(nodes=nodes, leaves=leaves):
                self.admitted, self.leaves = tuple(nodes), leaves
            case records.RoundStarted(round=number):
                self.round = RoundState(record, time_s, self.agents, self._reports[number])
                tests = STORAGE_NODES in record.options
                self.storage_round = self.round if tests else self.storage_round
            case records.StorageTested():
                self.storage.append(record)
            case records.GroupAborted(group=group) if self._is_current(record.round):
                assert self.round is not None
                self.round.aborted[tuple(group)] = record, time_s
            case records.RoundEnded() if self._is_current(record.round):
                assert self.round is not None
                self.ended.append(self._results(self.round, record, time_s))
                self.took_ms[self.round.record.phase] += self.round.took_ms
                self.round = None
            case records.DevicesWatched(node=name, devices=devices):
                self.burns[name].extend(devices)
            case records.VerdictReached():
                self.verdict = record
            case records.JobOutcome():
                self.finished = record
            case _:
                pass

    def _is_current(self, number: int) -> bool:
        return self.round is not None and self.round.record.round == number

    def _launched(self, record: records.AgentsLaunched, time_s: float) -> None:
        self.launches = max(self.launches, record.launch + 1)
        self.launched_s = max(self.launched_s, time_s)
        self.light = self.light or record.light
        for name in record.nodes:
            self.agents[name].begin(record.launch)
            for early in self._early.pop((name, record.launch), ()):
                self.agents[name].take(early)

    def _lost(self, record: records.AgentsLost, time_s: float) -> None:
        for node in map(self.agents.get, record.nodes):
            if node is not None and node.launch == record.launch:
                node.lose(record.cause, record.reason, time_s)

    def _agent_says(self, record: AgentRecord) -> None:
        node = self.agents.get(record.node)
        if isinstance(record, records.WorkersReady):
            known = self._first_ready.get(record.node)
            if known is None or (record.light and not known.light):  # torch's counted for nothing
                self._first_ready[record.node] = record
        if node is None or record.launch < node.launch:
            return  # an agent of an earlier launch that has not noticed yet
        if record.launch > node.launch:
            self._early[record.node, record.launch].append(record)
        else:
            node.take(record)

    def _node_says(self, record: records.Sampled | records.NodeReported) -> None:
        reports = self._reports[record.round]
        if record.node in reports:
            return  # that was its last word
        if isinstance(record, records.Sampled):
            self._samples[record.round].setdefault(record.node, []).append(record)
            if record.probe in _EXACT:
                self.exact.add(record.node)
            return
        reports[record.node] = record
        if self.round is not None and self.round.record.round == record.round:
            self.round.take(record)
        if record.connecting:
            self.did_not_connect.add(record.node)
        if record.wrong_results:
            self.wrong_results[record.node].append(record.detail)

    def _results(
        self, current: RoundState, record: records.RoundEnded, ended_s: float
    ) -> list[GroupResult]:
        """Put the round together from what stands in the journal.

        A report that came after the end of its round is that of a silent node: it does not count.
        """
        silent = set(record.silent)
        answered = {node: report for node, report in current.reports.items() if node not in silent}
        samples = self._samples[record.round]
        known = self.models()
        models = known if len(set(known.values())) > 1 else {}
        timed_out = {group for group, (abort, _) in current.aborted.items() if abort.timed_out}
        return [
            group_result(
                group,
                [s for node in group if node in answered for s in samples.get(node, ())],
                {node: answered[node] for node in group if node in answered},
                silent=silent.intersection(group),
                timed_out=group in timed_out,
                models=models,
                round_s=ended_s - current.started_s,
            )
            for group in current.groups
        ]

    # --- what the nodes are, and what they gave ------------------------------------------------

    def _all_samples(self) -> Iterator[records.Sampled]:
        """Yield the samples of all rounds, in their order."""
        for _, by_node in sorted(self._samples.items()):
            for samples in by_node.values():
                yield from samples

    def first_ready(self) -> dict[str, records.WorkersReady]:
        """Return what each admitted node said when its workers were ready for the first time."""
        known = self._first_ready
        return {name: known[name] for name in self.admitted or () if name in known}

    def models(self) -> dict[str, str]:
        """Return what each admitted node computes with, as far as it is known."""
        return {name: ready.model for name, ready in self.first_ready().items() if ready.model}

    def links(self) -> dict[str, Links]:
        """Return what connects the devices of each admitted node."""
        return {
            name: Links(devices=len(agent.devices), ports_gbit_per_s=tuple(agent.ports_gbit_per_s))
            for name, agent in self.first_ready().items()
        }

    def has_accelerators(self) -> bool:
        """Tell whether a node has accelerators, used by its workers or not."""
        return any(node.ready and node.ready.accelerators for node in self.agents.values())

    def device(self) -> DeviceKind:
        """Return what kind of device the admitted nodes compute with."""
        ready = self.first_ready().values()
        return DeviceKind.CPU if ready and on_cpus(ready) else DeviceKind.ACCELERATOR

    def transports(self) -> dict[str, str]:
        """Return by which way each node last exchanged data with others, where it is known."""
        return {
            sample.node: str(sample.figures["transport"])
            for sample in self._all_samples()
            if sample.figures.get("transport")
        }

    def served(self) -> dict[str, float]:
        """Return which share of the time of its own work each node had its processors.

        It is empty if others took no time of any node.
        """
        alone = [sample for sample in self._all_samples() if sample.scope == "solo"]
        shares: dict[str, list[float]] = {}
        for sample in alone if any(sample.taken_ms for sample in alone) else ():
            times = group_times((sample.node,), [sample])
            share = min((timed.served for timed in times), default=1.0)
            shares.setdefault(sample.node, []).append(share)
        return {node: median(values) for node, values in shares.items()}

    def figures(self, probe: str, nodes: Sequence[str]) -> list[Mapping[str, records.Figure]]:
        """Return the figures that a probe gave on these nodes, in all rounds."""
        among = frozenset(nodes)
        return [
            sample.figures
            for sample in self._all_samples()
            if sample.probe == probe and sample.node in among
        ]


def _named(record: records.Record | None) -> Iterable[str]:
    """Return the nodes that a record of the master's counts on."""
    if isinstance(record, records.AgentsLaunched | records.NodesAdmitted):
        return record.nodes
    if isinstance(record, records.RoundStarted):
        return (node for group in record.groups for node in group)
    return ()
