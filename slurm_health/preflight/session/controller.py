# SPDX-License-Identifier: Apache-2.0
"""What the master does next, from what is known of a check. Pure: no clock, no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec

from slurm_health.preflight.expectations import Expectation, expected_ms
from slurm_health.preflight.localize.settings import DeviceKind, settings_from
from slurm_health.preflight.probes import sizes
from slurm_health.preflight.session import absent, deadlines
from slurm_health.preflight.session.conclusion import Known, concluded
from slurm_health.preflight.session.course import Course, MakeLocalizer
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.phases import Phase, light_phases, without_torch
from slurm_health.preflight.session.state import CheckState, Group, RoundState, on_cpus
from slurm_health.preflight.session.storage import at_most_s, judge
from slurm_health.records.nodeset import fold
from slurm_health.records.probe_catalog import GPT, STORAGE_NODES, STORAGE_PATHS, Scope
from slurm_health.records.records import (
    AgentsLaunched,
    Figure,
    GroupAborted,
    NodesAdmitted,
    Record,
    Rendezvous,
    RoundEnded,
    RoundStarted,
    VerdictReached,
)
from slurm_health.records.text import counted
from slurm_health.records.verdict import NodeVerdict, Outcome, Round, StorageVerdict, Verdict


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing to do before `until_s`, unless the journal says more. `reason` says for what."""

    until_s: float
    reason: str


Step = Wait | tuple[Record, ...]
"""Wait, or write these records and do what they say; none once the verdict stands."""


class Controller:
    """One check, from launch to verdict. `state` is what the journal says of it: fold it there.

    `localize_options` are settings by names of `preflight.localize.settings.OPTIONS`. `light` says
    why light probes are to measure; where it is empty, those with torch do if the nodes have it.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        make_localizer: MakeLocalizer,
        limits: TimeLimits,
        phases: Sequence[Phase],
        expectations: Mapping[str, Expectation] = MappingProxyType({}),
        localize_options: Mapping[str, object] = MappingProxyType({}),
        light: str = "",
    ) -> None:
        self.state = CheckState(nodes)
        self.limits = limits
        self._make_localizer = make_localizer
        self._phases = phases
        self._expectations = expectations
        self._localize_options = localize_options
        self._light = light
        self._course: Course | None = None
        self._margin_s = limits.most_margin_s  # of the round in progress
        self._awaited_s: dict[str, float] = {}  # since when nodes are waited for between rounds
        self._unready = (len(nodes), 0.0)  # how many are to get ready, and since when so many

    def next_step(self, now_s: float) -> Step:
        """Say what to do now. `now_s` is the clock that stamps the master's records."""
        state = self.state
        if state.verdict is not None:
            return ()
        if state.round is not None:
            return self._in_round(state.round, now_s)
        if why := absent.without_torch(state):
            return self._launch([name for name, node in state.agents.items() if not node.lost], why)
        if (relaunch := self._relaunch(now_s)) is not None:
            return relaunch
        if state.admitted is None:
            return self._before_rounds(now_s)
        course = self._course_of(state.admitted)
        planned = course.next_round(state.ended)
        if planned is None or course.phase is None:
            if ordered := state.storage_round:
                until_s = ordered.started_s + at_most_s(len(ordered.begun))
                if now_s < until_s and (pending := len(state.storage_pending())):
                    return Wait(until_s=until_s, reason=f"storage of {counted(pending, 'node')}")
            return (self._concluded(course.verdict()),)
        return self._to_round(planned, course.phase, now_s)

    # --- before the rounds -------------------------------------------------------------------

    def _relaunch(self, now_s: float) -> Step | None:
        """Start what was never started, and start again what was lost, within bounds.

        A node on which a step could not be started is tried apart from the others: one such node
        ends the whole step, whose other losses then arrive one by one and are started together.
        """
        limits, admitted = self.limits, self.state.admitted
        wanted = {
            name: node
            for name, node in self.state.agents.items()
            if (node.lost or not node.launches)
            and node.launches < limits.launches_per_node
            and node.failed_starts < limits.failed_starts_per_node
            and (admitted is None or name in admitted)
        }
        if not wanted:
            return None
        untainted = [name for name, node in wanted.items() if not node.failed_starts]
        nodes = untainted or list(wanted)
        settled_s = max(wanted[name].lost_s for name in nodes) + limits.settle_s
        if now_s < settled_s:
            return Wait(until_s=settled_s, reason="more losses of the same step")
        return self._launch(nodes, self.state.light or self._light)

    def _launch(self, nodes: Sequence[str], light: str) -> Step:
        return (AgentsLaunched(launch=self.state.launches, nodes=list(nodes), light=light),)

    def _before_rounds(self, now_s: float) -> Step:
        """Wait for the nodes to get ready; admit those that are when waiting is over."""
        state, limits = self.state, self.limits
        pending = len(state.pending())
        if pending != self._unready[0]:
            self._unready = (pending, now_s)
        until_s = state.launched_s + limits.start_s
        if any(node.started for node in state.agents.values()):
            usual_s = state.launched_s + deadlines.to_get_ready_s(limits, state)
            still_coming_s = self._unready[1] + limits.next_ready_s
            until_s = max(usual_s, min(still_coming_s, state.launched_s + limits.ready_s))
        if pending and now_s < until_s:
            return Wait(until_s=until_s, reason=f"{pending} nodes to get ready")
        admitted = absent.comparable(state.agents)
        if not admitted:
            return (self._concluded(Verdict(nodes={})),)
        return (NodesAdmitted(nodes=admitted, leaves=self._leaves(admitted)),)

    def _leaves(self, nodes: Sequence[str]) -> dict[str, list[str]]:
        """Return which leaf switch has which nodes; nothing if that is not known of every node.

        Where Slurm knows of none, NVLink domains stand for them: the nodes of one are a rack, and
        share more than NVLink, which is not what is tested.
        """
        agents = [self.state.agents[name] for name in nodes]
        switches = [agent.started.leaf if agent.started else "" for agent in agents]
        domains = [agent.ready.nvlink_domain if agent.ready else "" for agent in agents]
        if not all(switches) and all(domains) and len(set(domains)) > 1:
            switches = domains
        leaves: dict[str, list[str]] = {}
        for name, leaf in zip(nodes, switches, strict=True):
            leaves.setdefault(leaf, []).append(name)
        return {} if "" in leaves else leaves

    # --- rounds ----------------------------------------------------------------------------

    def _course_of(self, admitted: Sequence[str]) -> Course:
        """Return the course of this check; its plans follow from the rounds that have ended."""
        if self._course is None:
            settings = settings_from(self._localize_options, kind=self.state.device())
            known_ms = expected_ms(
                self.state.models(),
                self._expectations,
                settings.expected_slack,
                {} if self.state.light else self.state.links(),  # their all-gathers use others
                self._work().reduced(),
            )
            self._course = Course(
                admitted,
                self.state.leaves or None,
                light_phases(self._phases) if self.state.light else self._phases,
                self._make_localizer,
                replace(settings, expected_ms={**known_ms, **settings.expected_ms}),
            )
        return self._course

    def _to_round(self, planned: Round, phase: Phase, now_s: float) -> Step:
        """Start the round once its nodes are ready, or once waiting longer is pointless."""
        agents, limits = self.state.agents, self.limits
        members = [node for group in planned.groups for node in group]
        pending = [node for node in members if agents[node].pending]
        # Whoever did not come back in time is not waited for again in the next round.
        self._awaited_s = {node: self._awaited_s.get(node, now_s) for node in pending}
        since_s = max(self._awaited_s.values(), default=now_s)
        until_s = since_s + deadlines.to_get_ready_s(limits, self.state)
        if pending and now_s < until_s:
            return Wait(until_s=until_s, reason=f"workers of {len(pending)} nodes to come back")
        ready = self.state.ready(members)
        self._margin_s = deadlines.margin_s(limits, ready)
        probes = phase.used(
            several_devices=any(len(one.devices) > 1 for one in ready), on_cpus=on_cpus(ready)
        )
        shared = [probe for probe in probes if probe.scope != Scope.SOLO.value]
        options = self._options(phase, members)
        if (paths := self.state.storage_paths) and not self.state.ended:  # beside the first round
            usable = fold(node for node in members if agents[node].usable)
            options |= {STORAGE_PATHS: paths, STORAGE_NODES: usable}
        started = RoundStarted(
            round=len(self.state.ended),
            groups=[list(group) for group in planned.groups],
            rendezvous=[self._rendezvous(group) for group in planned.groups],
            deadline_s=deadlines.at_most_s(limits, phase, ready),
            absent=[node for node in members if not agents[node].usable],
            phase=phase.name,
            name=phase.round_name(planned.index),
            probes=shared if planned.shared_only and shared else probes,
            options=options,
        )
        return (started,)

    def _rendezvous(self, group: Sequence[str]) -> Rendezvous:
        agents = [self.state.agents[node] for node in group]
        first = agents[0]
        if not all(agent.usable for agent in agents) or first.started is None or not first.ready:
            return Rendezvous(address="", port=0)
        return Rendezvous(address=first.started.address, port=first.ready.store_port)

    def _options(self, phase: Phase, nodes: Sequence[str]) -> dict[str, Figure]:
        """Return the options of a round: the phase's, and the work that all its nodes can do.

        Those of its phase, in this round or not: times of two models could not be compared.
        """
        options = dict(phase.options)
        if self.state.device() is DeviceKind.ACCELERATOR:
            options |= self._work().options()
            # Has the device named that hangs while NCCL connects, where a deadline has stopped
            # that: alone one is enough; partners that have not are not kept waiting for it.
            hung = self.state.did_not_connect
            if not hung.isdisjoint(nodes) if phase.alone else hung.issuperset(nodes):
                options["apart"] = 1
        if not any(probe.name in GPT for probe in phase.probes):
            return options
        assert self._course is not None
        in_phase, ready = self._course.members, self.state.first_ready()
        free_bytes = [
            ready[node].free_bytes for node in in_phase if node in ready and not ready[node].on_cpus
        ]
        batches = [
            int(figures["micro_batch"])
            for figures in self.state.figures("gpt_fit", in_phase)
            if "micro_batch" in figures
        ]
        speed = sizes.typical_gflop_per_s(ready.values())
        return {**options, **sizes.gpt_options(free_bytes, batches, speed)}

    def _work(self) -> sizes.Work:
        """Return the work of this run's rounds, by what its nodes said when they were ready."""
        return sizes.work_for(list(self.state.first_ready().values()))

    def _in_round(self, current: RoundState, now_s: float) -> Step:
        """Stop the groups that failed or have taken too long; end the round when nobody is left."""
        index = current.record.round
        end_s = deadlines.end_of_s(self.limits, current, self.state, self._margin_s)
        awaited = current.awaited()
        wake_s: list[float] = []
        aborts: list[Record] = []
        for group, failure in awaited.items():
            if group in current.aborted:
                give_up_s = current.aborted[group][1] + self.limits.abort_grace_s
                wake_s += [give_up_s] if now_s < give_up_s else []
            elif failure or now_s >= end_s:
                aborts.append(_abort(index, group, failure))
            else:
                wake_s.append(end_s)
        if aborts:
            return tuple(aborts)
        if not wake_s:
            return (RoundEnded(round=index, silent=current.silent()),)
        total = len(current.groups)
        done = f"{total - len(awaited)} of {total} groups done"
        return Wait(until_s=min(wake_s), reason=f"{current.record.name}: {done}")

    # --- the verdict -----------------------------------------------------------------------

    def _concluded(self, verdict: Verdict) -> VerdictReached:
        """Return the verdict of the check, with what is known of all its nodes."""
        state = self.state
        ready = state.first_ready()
        failed = {
            node
            for results in state.ended
            for result in results
            if len(result.nodes) > 1 and result.outcome in (Outcome.FAILED, Outcome.TIMED_OUT)
            for node in result.nodes
        }
        interfaces = {n: its.interface for n in failed if (its := state.agents[n].ready)}
        known = Known(
            burns=state.burns,
            wrong_results=state.wrong_results,
            exact=state.exact,
            interfaces={node: name for node, name in interfaces.items() if name},
            transports=state.transports(),
            served=state.served(),
            devices={name: its.devices for name, its in ready.items() if not its.on_cpus},
        )
        judged = list(judge(state.storage))
        clients = [verdict for verdict in judged if isinstance(verdict, NodeVerdict)]
        others = [*absent.judged(state, self.limits).values(), *clients]
        storage = [verdict for verdict in judged if isinstance(verdict, StorageVerdict)]
        record = concluded(state.nodes, verdict, known, others)
        record = msgspec.structs.replace(record, storage=storage)
        if not state.light:
            return record
        gpus = state.has_accelerators()
        unseen = without_torch(state.light, self._phases, gpus=gpus)
        return msgspec.structs.replace(record, unseen=unseen)


def _abort(index: int, group: Group, failure: str) -> GroupAborted:
    """Tell a group to stop: because of the failure of a member, else of the deadline."""
    return GroupAborted(
        round=index,
        group=list(group),
        reason=failure or "the deadline of the round has passed",
        timed_out=not failure,
    )
