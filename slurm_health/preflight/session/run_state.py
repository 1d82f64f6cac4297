# SPDX-License-Identifier: Apache-2.0
"""What is known of a run: the fold of its journal.

The same entries give the same state, whatever the order in which the files of the journal were
read, so a master that died is replaced by one that folds the journal and goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from slurm_health.preflight.expectations import Links
from slurm_health.preflight.localize.settings import DeviceKind
from slurm_health.preflight.session.measurement import group_result, served
from slurm_health.preflight.session.round_state import AgentRecord, NodeState, RoundState, on_cpus
from slurm_health.records import records
from slurm_health.records.gpu_load import Burn
from slurm_health.records.record_codec import Entry
from slurm_health.records.verdict import GroupResult, Outcome

# The probes that give a sample only where every result was the correct one.
_EXACT = frozenset({"values", "memory_pattern", "host_copy", "peer_copy"})


class RunState:
    """The fold of one run's journal. Reading it changes nothing.

    `wrong_results` holds what nodes said of devices that computed wrongly, `exact` the nodes all of
    whose devices have computed correctly in a round, `did_not_connect` those whose devices NCCL was
    connecting when a deadline passed. `pending` are the nodes that may yet become usable,
    `without_agent` those whose agent was never started or is lost. `light` says why they measure
    with light probes, empty where they do with torch.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self.agents = {node: NodeState() for node in nodes}
        self.pending = dict.fromkeys(self.agents)
        self.without_agent = set(self.agents)
        self.launched_s = 0.0  # the last time
        self.launches = 0
        self.light = ""
        self.admitted: tuple[str, ...] | None = None
        self.leaves: dict[str, list[str]] = {}
        self.started: records.RunStarted | None = None
        self.round: RoundState | None = None
        self.ended: list[tuple[int, list[GroupResult]]] = []
        self.verdict: records.VerdictReached | None = None
        self.finished: records.JobOutcome | None = None
        self._reports: defaultdict[int, dict[str, records.NodeReported]] = defaultdict(dict)
        self._samples: defaultdict[int, list[records.Sampled]] = defaultdict(list)
        # By node and launch, because a node's file may be read before the master's.
        self._words: defaultdict[tuple[str, int], list[AgentRecord]] = defaultdict(list)
        self.wrong_results: defaultdict[str, list[str]] = defaultdict(list)
        self.exact: set[str] = set()
        self.did_not_connect: set[str] = set()
        self.burns: defaultdict[str, list[Burn]] = defaultdict(list)
        self._first_ready: dict[str, records.WorkersReady] = {}
        self._ended_ms: defaultdict[str, list[float]] = defaultdict(list)

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes of the run, in order."""
        return tuple(self.agents)

    def awaited(self) -> list[str]:
        """Name the nodes that the run waits for: of a round, or to get ready before one."""
        current = self.round
        if current is None:
            return list(self.pending)
        return [
            node
            for group in current.awaited
            for node in current.unreported(group)
            if not self.agents[node].gone
        ]

    def unheard(self) -> list[str]:
        """Name the nodes that the run waits for, and those that went without a report.

        These may have written it just before.
        """
        current = self.round
        if current is None:
            return list(self.pending)
        began = filter(current.runs, current.groups)
        return [node for group in began for node in current.unreported(group)]

    def ready(self, nodes: Iterable[str]) -> list[records.WorkersReady]:
        """Return what those of these nodes said that have workers ready."""
        return [each for node in nodes if (each := self.agents[node].ready) is not None]

    def measured_ms(self, phase: str) -> list[float]:
        """Return how long each measured group of a phase took, for the deadlines of the others."""
        return [*self._ended_ms[phase], *(self.round.took_ms if self.round else ())]

    def has_timed_out(self) -> bool:
        """Tell whether a deadline has stopped a group in a round that has ended."""
        return any(
            result.outcome is Outcome.TIMED_OUT for _, results in self.ended for result in results
        )

    def fold(self, entry: Entry) -> None:
        """Take in one journal entry, of any writer; one that names a stranger says nothing."""
        if not self.agents.keys() >= {*_named(entry.record)}:
            return
        match entry.record:
            case records.Sampled() | records.NodeReported() as record:
                self._fold_result(record)
            case records.RoundStarted() | records.GroupAborted() | records.RoundEnded() as record:
                self._fold_round(record, entry.time_s)
            case (
                records.AgentStarted()
                | records.WorkersStarting()
                | records.WorkersReady()
                | records.WorkersFailed()
                | records.DevicesUnopened()
                | records.AgentEnded()
            ) as record:
                self._fold_agent(record)
            case records.AgentsLaunched() as record:
                self._fold_launch(record, entry.time_s)
            case records.AgentsLost() as record:
                self._fold_loss(record, entry.time_s)
            case records.DevicesWatched(node=node, devices=devices):
                self.burns[node].extend(devices)
            case _:
                self._fold_milestone(entry)

    def _fold_milestone(self, entry: Entry) -> None:
        match entry.record:
            case records.RunStarted() as record:
                self.started = record
            case records.NodesAdmitted(nodes=nodes, leaves=leaves):
                self.admitted = tuple(nodes)
                self.leaves = leaves
            case records.MasterResumed():
                self._fold_resume()
            case records.VerdictReached() as record:
                self.verdict = record
            case records.JobOutcome() as record:
                self.finished = record
            case _:
                pass

    def _fold_launch(self, record: records.AgentsLaunched, time_s: float) -> None:
        self.launches = max(self.launches, record.launch + 1)
        self.light = self.light or record.light
        for name in record.nodes:
            node = self.agents[name]
            node.begin(record.launch, time_s)
            for word in self._words[name, record.launch]:
                node.heed(word)
        self.launched_s = max(self.launched_s, time_s)
        self._changed(record.nodes)

    def _fold_resume(self) -> None:
        for name, node in self.agents.items():
            if self.admitted is not None and name not in self.admitted:
                continue  # it takes no part any more, and what is known of it stays true
            node.launches = 0
            node.lost = node.lost or "its master died"
        self._changed(self.agents)
        if self.round is not None:
            self.round.void = True

    def _fold_loss(self, record: records.AgentsLost, time_s: float) -> None:
        for name in record.nodes:
            node = self.agents.get(name)
            if node is None or node.launch != record.launch:
                continue
            node.lose(record.cause, record.reason, time_s)
            self._changed([name])

    def _fold_agent(self, record: AgentRecord) -> None:
        self._words[record.node, record.launch].append(record)
        if isinstance(record, records.WorkersReady):
            known = self._first_ready.get(record.node)
            if known is None or (record.light and not known.light):  # torch's counted for nothing
                self._first_ready[record.node] = record
        node = self.agents.get(record.node)
        if node is None or node.launch != record.launch:
            return  # an agent of an earlier launch that has not noticed yet
        node.heed(record)
        self._changed([record.node])

    def _changed(self, names: Iterable[str]) -> None:
        """Sort nodes anew of whose agents more is known."""
        for name in names:
            node = self.agents[name]
            if node.pending:
                self.pending[name] = None
            else:
                self.pending.pop(name, None)
            if node.launches == 0 or node.lost:
                self.without_agent.add(name)
            else:
                self.without_agent.discard(name)
        if self.round is not None:
            self.round.look_again_at(names)

    def _fold_result(self, record: records.Sampled | records.NodeReported) -> None:
        if record.node in self._reports[record.round]:
            return  # that was its last word
        if isinstance(record, records.Sampled):
            self._samples[record.round].append(record)
            if record.probe in _EXACT:
                self.exact.add(record.node)
            return
        self._reports[record.round][record.node] = record
        if self.round is not None:
            self.round.look_again_at([record.node])
        if record.connecting:
            self.did_not_connect.add(record.node)
        if record.wrong_results:
            self.wrong_results[record.node].append(record.detail)

    def _fold_round(
        self,
        record: records.RoundStarted | records.GroupAborted | records.RoundEnded,
        time_s: float,
    ) -> None:
        if isinstance(record, records.RoundStarted):
            self.round = RoundState(
                record=record,
                started_s=time_s,
                agents=self.agents,
                reports=self._reports[record.round],
            )
        elif self.round is None or record.round != self.round.record.round:
            return
        elif isinstance(record, records.GroupAborted):
            self.round.aborted[tuple(record.group)] = (record, time_s)
        else:
            self.ended.append((record.round, self._results(self.round, record, time_s)))
            self.round = None

    def _results(
        self, current: RoundState, record: records.RoundEnded, ended_s: float
    ) -> list[GroupResult]:
        """Put the round together from what stands in the journal whatever its reading order.

        A report that came after the end of its round is that of a silent node: it does not count.
        A void round has no results.
        """
        if record.void:
            return []
        silent = set(record.silent)
        answered = {node: report for node, report in current.reports.items() if node not in silent}
        self._ended_ms[current.record.phase] += current.measured_ms(answered)
        samples: defaultdict[str, list[records.Sampled]] = defaultdict(list)
        for sample in self._samples[record.round]:
            if sample.node in answered:
                samples[sample.node].append(sample)
        known = self.models()
        models = known if len(set(known.values())) > 1 else {}
        timed_out = {group for group, (abort, _) in current.aborted.items() if abort.timed_out}
        return [
            group_result(
                group,
                [sample for node in group for sample in samples[node]],
                {node: answered[node] for node in group if node in answered},
                silent=silent.intersection(group),
                timed_out=group in timed_out,
                models=models,
                round_s=ended_s - current.started_s,
            )
            for group in current.groups
        ]

    def models(self) -> dict[str, str]:
        """Return what each admitted node computes with, as far as it is known."""
        return {name: ready.model for name, ready in self.first_ready().items() if ready.model}

    def first_ready(self) -> dict[str, records.WorkersReady]:
        """Return what each admitted node said when its workers were ready for the first time."""
        known = self._first_ready
        return {name: known[name] for name in self.admitted or () if name in known}

    def links(self) -> dict[str, Links]:
        """Return what connects the devices of each admitted node."""
        return {
            name: Links(devices=len(each.devices), ports_gbit_per_s=tuple(each.ports_gbit_per_s))
            for name, each in self.first_ready().items()
        }

    def devices(self) -> dict[str, list[str]]:
        """Return what the accelerators of each admitted node are, where it has some."""
        ready = self.first_ready()
        return {name: each.devices for name, each in ready.items() if not each.on_cpus}

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
            for _, samples in sorted(self._samples.items())
            for sample in samples
            if sample.figures.get("transport")
        }

    def served(self) -> dict[str, float]:
        """Return which share of the time of its own work each node had its processors."""
        shares: dict[str, list[float]] = {}
        for sample in (sample for samples in self._samples.values() for sample in samples):
            share = served(sample) if sample.scope == "solo" else None
            if share is not None:
                shares.setdefault(sample.node, []).append(share)
        return {node: median(each) for node, each in shares.items()}

    def figures(self, probe: str, nodes: Sequence[str]) -> list[Mapping[str, records.Figure]]:
        """Return the figures that a probe gave on these nodes, in all rounds."""
        among = frozenset(nodes)
        return [
            sample.figures
            for samples in self._samples.values()
            for sample in samples
            if sample.probe == probe and sample.node in among
        ]


def _named(record: records.Record | None) -> Iterable[str]:
    """Return the nodes that a record of the master's counts on."""
    if isinstance(record, records.AgentsLaunched | records.NodesAdmitted):
        return record.nodes
    if isinstance(record, records.RoundStarted):
        return (node for group in record.groups for node in group)
    return ()
