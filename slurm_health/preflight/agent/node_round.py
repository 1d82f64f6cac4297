# SPDX-License-Identifier: Apache-2.0
"""One node's part in one round: which groups its workers form, what they gave, how it ended.

Pure. The agent carries lines between this, its workers and the journal.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import field
from msgspec.structs import replace as changed

from slurm_health.preflight.agent.worker_process import Done, Gone, InRound, ScopeEntered
from slurm_health.records.probe_catalog import Metric, Scope
from slurm_health.records.records import GroupAborted, Rendezvous, RoundStarted, Sampled
from slurm_health.records.verdict import Outcome

# In these a worker waits for workers of other nodes, and may end because one of those has.
_WITH_PARTNERS = frozenset({Scope.RAIL.value, Scope.PAIR.value})


class RoundEnding(msgspec.Struct, frozen=True, kw_only=True):
    """How a round ended for a node.

    `replace`: its workers are not to be used again. `unsettled`: some of them are not done, and
    are of use again if they heed an abort. `connecting`: NCCL was connecting their devices when
    they were stopped.
    """

    outcome: Outcome
    detail: str
    crashed: bool = False
    wrong_results: bool = False
    unmeasured: bool = False
    replace: bool = False
    unsettled: bool = False
    connecting: bool = False


class NodeRound(msgspec.Struct):
    """The round a node is in; `started_s` by the agent's own clock.

    `on_cpus`: its workers have no devices by whose numbers they could be named.
    """

    record: RoundStarted
    node: str
    group: list[str]
    workers: int
    started_s: float
    on_cpus: bool = False
    aborted: GroupAborted | None = None
    kill_at_s: float | None = None
    _scopes: dict[int, str] = field(default_factory=dict)
    _samples: dict[Metric, dict[int, Sampled]] = field(default_factory=dict)
    _done: dict[int, Done] = field(default_factory=dict)

    def is_aborted_by(self, record: GroupAborted) -> bool:
        """Tell whether a record ends this round for this node."""
        return (record.round, record.group) == (self.record.round, self.group)

    def take(self, local_rank: int, line: InRound) -> Sampled | RoundEnding | None:
        """Take what a worker says; return what is to be recorded of it, if that is known now.

        A quantity is recorded once all workers have measured it.
        """
        match line:
            case ScopeEntered(scope=scope):
                self._scopes[local_rank] = scope
                return None
            case Done():
                return self.done(local_rank, line)
            case Sampled():
                samples = self._samples.setdefault(line.metric, {})
                samples[local_rank] = line
                return self._together(samples) if len(samples) == self.workers else None

    def gone(self, local_rank: int, gone: Gone) -> RoundEnding:
        """Return how the round ends in which a worker ended, or stands still.

        A library may end a process because its partner's has ended, so that counts as a crash of
        this node only where no other node can be the cause. That a process was stopped by a signal
        is this node's own failure. That the kernel holds it may be a filesystem's, and says nothing
        about the node.
        """
        process = self._process(local_rank)
        if not gone.still or gone.stopped:
            own = gone.stopped or self._scopes.get(local_rank) not in _WITH_PARTNERS
            how = "stands still" if gone.still else "died"
            detail = f"{process} {how}: {gone.how}"
            return RoundEnding(outcome=Outcome.FAILED, detail=detail, crashed=own, replace=True)
        detail = f"{process} stands still: {gone.how}"
        return RoundEnding(outcome=Outcome.NOT_RUN, detail=detail, unmeasured=True, replace=True)

    def not_begun(self, how: str) -> RoundEnding:
        """Return how the round ends of which a worker's process did not see the begin.

        A library may end a process late, because a partner's has ended: no crash of this node.
        """
        detail = f"a check process died before the round began: {how}"
        return RoundEnding(outcome=Outcome.NOT_RUN, detail=detail, unmeasured=True)

    def refused(self, program: str) -> RoundEnding:
        """Return how a round ends that names a program which this node was not started with."""
        detail = f"node 0 asks for {program}, which --check of this node does not name"
        return RoundEnding(outcome=Outcome.NOT_RUN, detail=detail, unmeasured=True)

    def partial_samples(self) -> list[Sampled]:
        """Return the records of what only some of the workers measure, once all have ended."""
        return [
            self._together(samples)
            for samples in self._samples.values()
            if len(samples) < self.workers
        ]

    def done(self, local_rank: int, event: Done) -> RoundEnding | None:
        """Take how a worker ended its round; return how the node's ended, once that is known.

        It is known when all workers are done, or one has failed.
        """
        self._done[local_rank] = event
        failed = self._ended_as("failed")
        unmeasured = self._ended_as("unmeasured")
        waiting = len(self._done) < self.workers
        replace = any(one.spent for one in self._done.values())
        # Another worker of this node may wait for the one that gave up.
        unsettled = waiting and not replace
        if failed:
            return RoundEnding(
                outcome=Outcome.FAILED,
                detail=failed[0].detail,
                crashed=any(one.own_fault for one in failed),
                wrong_results=any(one.wrong_results for one in failed),
                replace=replace,
                unsettled=unsettled,
            )
        if unmeasured:
            return RoundEnding(
                outcome=Outcome.NOT_RUN,
                detail=unmeasured[0].detail,
                unmeasured=True,
                replace=replace,
                unsettled=unsettled,
            )
        return None if waiting else self._all_done(replace=replace)

    def stuck(self) -> RoundEnding:
        """Return how the round of an aborted group ends for workers that did not heed it."""
        assert self.aborted is not None
        outcome = _outcome(self.aborted)
        connecting = any(one.connecting for one in self._done.values())
        return RoundEnding(
            outcome=outcome,
            detail=f"did not finish{self._stuck_on()}, and was stopped: {self.aborted.reason}",
            replace=True,
            connecting=connecting and outcome is Outcome.TIMED_OUT,
        )

    def _process(self, local_rank: int) -> str:
        """Name the process of a worker."""
        if not self.on_cpus:
            return f"check process of device {local_rank}"
        return f"check process {local_rank}" if self.workers > 1 else "check process"

    def _stuck_on(self) -> str:
        """Say on which devices, where no worker can be stuck because of another one's device."""
        stuck = [rank for rank in range(self.workers) if rank not in self._done]
        if not stuck or any(self._scopes.get(rank) != Scope.SOLO.value for rank in stuck):
            return ""
        if self.on_cpus and self.workers == 1:
            return " its own work"
        return (
            f" {'in check process' if self.on_cpus else 'on device'} {', '.join(map(str, stuck))}"
        )

    def _ended_as(self, outcome: str) -> list[Done]:
        return [one for one in self._done.values() if one.outcome == outcome]

    def _all_done(self, *, replace: bool) -> RoundEnding:
        stopped = [one for one in self._done.values() if one.outcome != "measured"]
        if not stopped:
            return RoundEnding(outcome=Outcome.MEASURED, detail="")
        if self.aborted is None:
            detail = stopped[0].detail
            return RoundEnding(outcome=Outcome.TIMED_OUT, detail=detail, replace=replace)
        outcome = _outcome(self.aborted)
        where = self._connecting() if outcome is Outcome.TIMED_OUT else ""
        return RoundEnding(
            outcome=outcome,
            detail=f"{self.aborted.reason}{where}",
            replace=replace,
            connecting=bool(where),
        )

    def _connecting(self) -> str:
        """Say which devices NCCL was connecting as the round was stopped, empty where it was not.

        The fewest that hang together tell most: one by itself before two, two before all.
        """
        circles = {tuple(one.connecting) for one in self._done.values() if one.connecting}
        if not circles:
            return ""
        fewest = min(map(len, circles))
        named = sorted(one for one in circles if len(one) == fewest)
        if fewest >= max(self.workers, 2):
            what = f"all {self.workers} devices" if self.workers > 1 else "the device"
            others = " with those of the other node" if fewest > self.workers else ""
            where = f": NCCL does not connect {what}{others}"
            if "apart" not in self.record.options:
                return where
            return (
                f"{where}, though it initialises on each by itself; which one is at fault is not"
                " known"
            )
        if fewest == 1:
            numbers = ", ".join(str(circle[0]) for circle in named)
            return f": NCCL does not initialise on device {numbers}, even by itself"
        between = ", ".join(f"{first} and {second}" for first, second in named)
        return f": NCCL does not connect devices {between}, though it initialises on each by itself"

    def _together(self, samples: Mapping[int, Sampled]) -> Sampled:
        """Return the record of all workers: the times of each, by local rank.

        The figures are those of the one with least room: what fits it fits all.
        """
        ranks = range(max(samples) + 1)
        taken = any(sample.taken_ms for sample in samples.values())
        least = min(samples.values(), key=_micro_batch)
        return changed(
            least,
            node=self.node,
            group=self.group,
            iteration_ms=[_rounded(samples[r].iteration_ms) if r in samples else [] for r in ranks],
            taken_ms=[
                _rounded(samples[r].taken_ms) if r in samples else [] for r in ranks if taken
            ],
        )


def _rounded(alone: list[list[float]]) -> list[float]:
    return [round(value, 4) for values in alone for value in values]


def _micro_batch(sample: Sampled) -> float:
    batch = sample.figures.get("micro_batch")
    return batch if isinstance(batch, int | float) else 0


def round_command(
    secret: str, current: NodeRound, local_rank: int, *, far: Rendezvous, near: Rendezvous
) -> dict[str, object]:
    """Return what a worker is told of a round: the process group of each scope among all else.

    A scope in which a worker has nobody beside it has none.

    Args:
        secret: names the meetings, for nobody else to come to them.
        current: the round.
        local_rank: which of the node's workers.
        far: where the nodes of the group meet.
        near: where the workers of this node meet.
    """
    record, group, size = current.record, current.group, current.workers
    place = group.index(current.node)
    groups: dict[str, dict[str, object]] = {}

    def join(scope: str, at: Rendezvous, name: str, rank: int, world_size: int) -> None:
        groups[scope] = {
            "rank": rank,
            "world_size": world_size,
            "prefix": f"{secret}/{record.round}/{name}",
            "address": at.address,
            "port": at.port,
        }

    if size > 1:
        join("node", near, "node", local_rank, size)
    if size > 1 and len(group) > 1:
        groups["rail"] = {"rank": place, "world_size": len(group)}  # part of the pair's group
    if len(group) > 1:
        join("pair", far, group[0], place * size + local_rank, len(group) * size)
    return {
        "op": "round",
        "round": record.round,
        "timeout_s": record.deadline_s + 10.0,
        "local_size": size,
        "probes": msgspec.to_builtins(record.probes),
        "options": record.options,
        "groups": groups,
    }


def _outcome(aborted: GroupAborted) -> Outcome:
    return Outcome.TIMED_OUT if aborted.timed_out else Outcome.NOT_RUN
