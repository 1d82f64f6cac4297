# SPDX-License-Identifier: Apache-2.0
"""The state machine of one check: from what is known to what the master does next.

It holds no clock and touches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec

from slurm_health.preflight.expectations import Expectation, bases, expected_ms
from slurm_health.preflight.localize.settings import DeviceKind, settings_from
from slurm_health.preflight.probes import sizes
from slurm_health.preflight.session import absent
from slurm_health.preflight.session.conclusion import (
    judged,
    with_burns,
    with_devices,
    with_interfaces,
    with_limits,
    with_others,
    with_transports,
    with_wrong_results,
)
from slurm_health.preflight.session.deadlines import Deadlines, TimeLimits
from slurm_health.preflight.session.phase_runner import Course, MakeLocalizer
from slurm_health.preflight.session.phases import Phase, light_phases, without_torch
from slurm_health.preflight.session.round_state import RoundState, on_cpus
from slurm_health.preflight.session.run_state import RunState
from slurm_health.records.probe_catalog import GPT, Scope
from slurm_health.records.records import (
    AgentsLaunched,
    Figure,
    GroupAborted,
    NodesAdmitted,
    ProbeUsed,
    Record,
    Rendezvous,
    RoundEnded,
    RoundStarted,
)
from slurm_health.records.verdict import Outcome, Round, Verdict


@dataclass(frozen=True, kw_only=True)
class Append:
    """Write this record; nothing else."""

    record: Record


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Write these records: all that is to be stopped now, however many groups that are."""

    records: tuple[GroupAborted, ...]


@dataclass(frozen=True, kw_only=True)
class LaunchAgents:
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


Step = Append | Abort | LaunchAgents | Wait | Conclude


class Session:
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
        self.state = RunState(nodes)
        self.limits = limits
        self._deadlines = Deadlines(limits, self.state)
        self._make_localizer = make_localizer
        self._phases = phases
        self._expectations = expectations
        self._localize_options = localize_options
        self._light = light
        self._course: Course | None = None
        self._awaited_s: dict[str, float] = {}  # since when nodes are waited for between rounds
        self._unready = (len(nodes), 0.0)  # how many are to get ready, and since when so many

    def next_step(self, now_s: float) -> Step:
        """Say what to do now. `now_s` is the clock that stamps the master's records."""
        state = self.state
        if state.verdict is not None:
            return Conclude()
        if state.round is not None:
            return self._step_in_round(state.round, now_s)
        if why := absent.without_torch(state):
            return self._launch([name for name, node in state.agents.items() if not node.lost], why)
        relaunch = self._relaunch(now_s)
        if relaunch is not None:
            return relaunch
        if state.admitted is None:
            return self._step_before_rounds(now_s)
        course = self._course_of(state.admitted)
        planned = course.next_round(state.ended)
        if planned is None or course.phase is None:
            verdict = with_burns(course.verdict(), state.burns)
            verdict = with_wrong_results(verdict, state.wrong_results, state.exact)
            verdict = with_interfaces(verdict, self._failed_over())
            verdict = with_transports(verdict, state.transports())
            verdict = with_others(verdict, state.served())
            verdict = with_limits(verdict, bases(state.models(), self._expectations))
            verdict = with_devices(verdict, state.devices())
            return self._judged(verdict)
        return self._step_to_round(planned, course.phase, now_s)

    def _judged(self, verdict: Verdict) -> Append:
        """Return the end of the run: this verdict, with what is to be said of all other nodes."""
        record = judged(self.state.nodes, verdict, absent.judged(self.state, self.limits))
        if why := self.state.light:
            record = msgspec.structs.replace(record, unseen=self._unseen(why))
        return Append(record=record)

    def _unseen(self, why: str) -> str:
        return without_torch(why, self._phases, gpus=self.state.has_accelerators())

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

    def _options(self, phase: Phase, nodes: Sequence[str]) -> dict[str, Figure]:
        """Return the options of a round: the phase's, and the work that all its nodes can do.

        Those of its phase, in this round or not: times of two models could not be compared.
        """
        options = dict(phase.options)
        if self.state.device() is DeviceKind.ACCELERATOR:
            options |= self._work().options()
            if self._hung(phase, nodes):
                options["apart"] = 1  # has the device found that hangs while NCCL connects
        if not any(probe.name in GPT for probe in phase.probes):
            return options
        assert self._course is not None
        in_phase, ready = self._course.members, self.state.first_ready()
        found = [ready[node] for node in in_phase if node in ready]
        free_bytes = [each.free_bytes for each in found if not each.on_cpus]
        batches = [
            int(figures["micro_batch"])
            for figures in self.state.figures("gpt_fit", in_phase)
            if "micro_batch" in figures
        ]
        speed = sizes.typical_gflop_per_s(ready.values())
        return {**options, **sizes.gpt_options(free_bytes, batches, speed)}

    def _hung(self, phase: Phase, nodes: Sequence[str]) -> bool:
        """Tell whether a deadline has stopped these nodes while NCCL connected their devices.

        Where each is alone one is enough; partners that have not are not kept waiting for it.
        """
        hung = self.state.did_not_connect
        return not hung.isdisjoint(nodes) if phase.alone else hung.issuperset(nodes)

    def _work(self) -> sizes.Work:
        """Return the work of this run's rounds, by what its nodes said when they were ready."""
        return sizes.work_for(list(self.state.first_ready().values()))

    # --- before the rounds -------------------------------------------------------------------

    def _relaunch(self, now_s: float) -> LaunchAgents | Wait | None:
        """Start what was never started, and start again what was lost, within bounds.

        A node on which a step could not be started is tried apart from the others: one such node
        ends the whole step, whose other losses then arrive one by one and are started together.
        """
        limits, admitted = self.limits, self.state.admitted
        if not self.state.without_agent:
            return None
        wanted = [
            name
            for name, node in self.state.agents.items()
            if name in self.state.without_agent
            and node.launches < limits.launches_per_node
            and node.failed_starts < limits.failed_starts_per_node
            and (admitted is None or name in admitted)
        ]
        untainted = [name for name in wanted if not self.state.agents[name].failed_starts]
        nodes = untainted or wanted
        if not nodes:
            return None
        settled_s = max(self.state.agents[name].lost_s for name in nodes) + limits.settle_s
        if now_s < settled_s:
            return Wait(until_s=settled_s, reason="more losses of the same step")
        return self._launch(nodes, self.state.light or self._light)

    def _launch(self, nodes: Sequence[str], light: str) -> LaunchAgents:
        launch = self.state.launches
        return LaunchAgents(record=AgentsLaunched(launch=launch, nodes=list(nodes), light=light))

    def _step_before_rounds(self, now_s: float) -> Step:
        pending = len(self.state.pending)
        if pending != self._unready[0]:
            self._unready = (pending, now_s)
        if pending and now_s < (until_s := self._ready_until_s()):
            return Wait(until_s=until_s, reason=f"{pending} nodes to get ready")
        admitted = absent.comparable(self.state.agents)
        if not admitted:
            return self._judged(Verdict(nodes={}))
        return Append(record=NodesAdmitted(nodes=admitted, leaves=self._leaves(admitted)))

    def _ready_until_s(self) -> float:
        any_started = any(node.started for node in self.state.agents.values())
        launched_s = self.state.launched_s
        if not any_started:
            return launched_s + self.limits.start_s
        until_s = launched_s + self._deadlines.to_get_ready_s()
        still_coming_s = self._unready[1] + self.limits.next_ready_s
        return max(until_s, min(still_coming_s, launched_s + self.limits.ready_s))

    def _leaves(self, nodes: Sequence[str]) -> dict[str, list[str]]:
        """Return which leaf switch has which nodes; nothing if that is not known of every node.

        Where Slurm knows of none, NVLink domains stand for them: the nodes of one are a rack, and
        share more than NVLink, which is not what is tested.
        """
        agents = [self.state.agents[name] for name in nodes]
        switches = [each.started.leaf if each.started else "" for each in agents]
        domains = [each.ready.nvlink_domain if each.ready else "" for each in agents]
        if not all(switches) and all(domains) and len(set(domains)) > 1:
            switches = domains
        leaves: dict[str, list[str]] = {}
        for name, leaf in zip(nodes, switches, strict=True):
            leaves.setdefault(leaf, []).append(name)
        return {} if "" in leaves else leaves

    def _failed_over(self) -> dict[str, str]:
        """Return the interface of each node whose group failed in some round."""
        failed = {
            node
            for _, results in self.state.ended
            for result in results
            if len(result.nodes) > 1 and result.outcome in (Outcome.FAILED, Outcome.TIMED_OUT)
            for node in result.nodes
        }
        ready = {node: self.state.agents[node].ready for node in failed}
        return {node: each.interface for node, each in ready.items() if each and each.interface}

    # --- rounds ----------------------------------------------------------------------------

    def _step_to_round(self, planned: Round, phase: Phase, now_s: float) -> Step:
        """Start the round once its nodes are ready, or once waiting longer is pointless."""
        agents = self.state.agents
        members = [node for group in planned.groups for node in group]
        pending = [node for node in members if agents[node].pending]
        # Whoever did not come back in time is not waited for again in the next round.
        self._awaited_s = {node: self._awaited_s.get(node, now_s) for node in pending}
        until_s = max(self._awaited_s.values(), default=now_s) + self._deadlines.to_get_ready_s()
        if pending and now_s < until_s:
            return Wait(until_s=until_s, reason=f"workers of {len(pending)} nodes to come back")
        return Append(
            record=RoundStarted(
                round=planned.index,
                groups=[list(group) for group in planned.groups],
                rendezvous=[self._rendezvous(group) for group in planned.groups],
                deadline_s=self._deadlines.at_most_s(phase, members),
                absent=[node for node in members if not agents[node].usable],
                phase=phase.name,
                probes=self._probes(phase, members, shared_only=planned.shared_only),
                options=self._options(phase, members),
            )
        )

    def _probes(self, phase: Phase, nodes: Sequence[str], *, shared_only: bool) -> list[ProbeUsed]:
        ready = self.state.ready(nodes)
        used = phase.used(
            several_devices=any(len(each.devices) > 1 for each in ready),
            on_cpus=on_cpus(ready),
        )
        shared = [probe for probe in used if probe.scope != Scope.SOLO.value]
        return shared if shared_only and shared else used

    def _rendezvous(self, group: Sequence[str]) -> Rendezvous:
        agents = [self.state.agents[node] for node in group]
        first = agents[0]
        if not all(agent.usable for agent in agents) or first.started is None or not first.ready:
            return Rendezvous(address="", port=0)
        return Rendezvous(address=first.started.address, port=first.ready.store_port)

    def _step_in_round(self, current: RoundState, now_s: float) -> Step:
        index = current.record.round
        if current.void:
            return Append(record=RoundEnded(round=index, void=True))
        deadline_s = self._deadlines.end_of_s(current)
        awaited = current.awaited
        wake_s, aborts = [], []
        for group, failure in awaited.items():
            if group in current.aborted:
                give_up_s = current.aborted[group][1] + self.limits.abort_grace_s
                wake_s += [give_up_s] if now_s < give_up_s else []
            elif failure or now_s >= deadline_s:
                aborts.append(_abort(index, group, failure))
            else:
                wake_s.append(deadline_s)
        if aborts:
            return Abort(records=tuple(aborts))
        if not wake_s:
            return Append(record=RoundEnded(round=index, silent=current.silent()))
        total = len(current.groups)
        done = f"{total - len(awaited)} of {total} groups done"
        return Wait(until_s=min(wake_s), reason=f"round {index} ({current.record.phase}): {done}")


def _abort(index: int, group: tuple[str, ...], failure: str) -> GroupAborted:
    """Tell a group to stop: because of the failure of a member, else of the deadline."""
    return GroupAborted(
        round=index,
        group=list(group),
        reason=failure or "the deadline of the round has passed",
        timed_out=not failure,
    )
