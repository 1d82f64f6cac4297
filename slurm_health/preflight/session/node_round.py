# SPDX-License-Identifier: Apache-2.0
"""One node's part in one round: which groups its workers form, what they gave, how it ended.

Pure. The agent carries words between this, its workers and the journal. What a worker says in a
round is plain JSON, as `preflight.probes.worker` writes it; each event becomes a value of a type
here where it arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import field

from slurm_health.records.probe_catalog import Metric, Scope
from slurm_health.records.records import GroupAborted, Rendezvous, RoundStarted, Sampled
from slurm_health.records.verdict import Outcome

# In these a worker waits for workers of other nodes, and may end because one of those has.
_WITH_PARTNERS = frozenset({Scope.RAIL.value, Scope.PAIR.value})


class InRound(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """One thing that a worker says in a round."""

    round: int


class ScopeEntered(InRound, frozen=True, kw_only=True, tag="scope"):
    """With whom it works from now on."""

    scope: str


class Measured(InRound, frozen=True, kw_only=True, tag="sample"):
    """What one probe measured; the fields are those of `Sampled`, for one worker."""

    probe: str
    quantity: str
    scope: str
    iteration_ms: list[float]
    world_size: int
    total_bytes: int
    flop: float
    figures: dict[str, Any]
    taken_ms: list[float] = []


class Done(InRound, frozen=True, kw_only=True, tag="done"):
    """How its round ended: `measured`, `unmeasured`, `timed_out` or `failed`.

    `own_fault`: no other node can be the cause. `spent`: it is not to be used again. `connecting`:
    whom NCCL was connecting when it was told to stop, of its node by local rank, or all by rank.
    """

    outcome: str
    detail: str
    own_fault: bool = False
    wrong_results: bool = False
    spent: bool = False
    connecting: list[int] = []  # msgspec copies it


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
    _samples: dict[Metric, dict[int, Measured]] = field(default_factory=dict)
    _done: dict[int, Done] = field(default_factory=dict)

    def is_aborted_by(self, record: GroupAborted) -> bool:
        """Tell whether a record ends this round for this node."""
        return (record.round, record.group) == (self.record.round, self.group)

    def hear(self, local_rank: int, event: InRound) -> Sampled | RoundEnding | None:
        """Take what a worker says; return what is to be recorded of it, if that is known now."""
        match event:
            case ScopeEntered(scope=scope):
                self._scopes[local_rank] = scope
            case Measured():
                return self._sample(local_rank, event)
            case Done():
                return self.done(local_rank, event)
        return None

    def died(self, local_rank: int, how: str) -> RoundEnding:
        """Return how the round ends of which a worker's process did not see the end.

        A library may end a process because its partner's has ended, so it counts as a crash of
        this node only where no other node can be the cause.
        """
        return RoundEnding(
            outcome=Outcome.FAILED,
            detail=f"{self._process(local_rank)} died: {how}",
            crashed=self._scopes.get(local_rank) not in _WITH_PARTNERS,
            replace=True,
        )

    def not_begun(self, how: str) -> RoundEnding:
        """Return how the round ends of which a worker's process did not see the begin.

        A library may end a process late, because a partner's has ended: no crash of this node.
        """
        detail = f"a check process died before the round began: {how}"
        return RoundEnding(outcome=Outcome.NOT_RUN, detail=detail, unmeasured=True)

    def stands_still(self, local_rank: int, how: str, *, stopped: bool) -> RoundEnding:
        """Return how the round ends in which a worker's process is found to stand still.

        That it was stopped by a signal is this node's own failure. That the kernel holds it may be
        a filesystem's, and says nothing about the node.
        """
        detail = f"{self._process(local_rank)} stands still: {how}"
        if stopped:
            return RoundEnding(outcome=Outcome.FAILED, detail=detail, crashed=True, replace=True)
        return RoundEnding(outcome=Outcome.NOT_RUN, detail=detail, unmeasured=True, replace=True)

    def _sample(self, local_rank: int, event: Measured) -> Sampled | None:
        """Take what a worker measured; return the quantity's record once all have given theirs."""
        metric = Metric(probe=event.probe, quantity=event.quantity)
        given = self._samples.setdefault(metric, {})
        given[local_rank] = event
        return self._sampled(metric) if len(given) == self.workers else None

    def partial_samples(self) -> list[Sampled]:
        """Return the records of what only some of the workers measure, once all have ended."""
        return [
            self._sampled(metric)
            for metric, given in self._samples.items()
            if len(given) < self.workers
        ]

    def done(self, local_rank: int, event: Done) -> RoundEnding | None:
        """Take how a worker ended its round; return how the node's ended, once that is known.

        It is known when all workers are done, or one has failed.
        """
        self._done[local_rank] = event
        failed = self._ended_as("failed")
        unmeasured = self._ended_as("unmeasured")
        waiting = len(self._done) < self.workers
        replace = any(each.spent for each in self._done.values())
        # Another worker of this node may wait for the one that gave up.
        unsettled = waiting and not replace
        if failed:
            return RoundEnding(
                outcome=Outcome.FAILED,
                detail=failed[0].detail,
                crashed=any(each.own_fault for each in failed),
                wrong_results=any(each.wrong_results for each in failed),
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
        connecting = any(each.connecting for each in self._done.values())
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

    def _together(self, *, with_others: bool) -> str:
        """Say that devices do not connect, and that nothing tells which of them is at fault."""
        what = f"all {self.workers} devices" if self.workers > 1 else "the device"
        others = " with those of the other node" if with_others else ""
        where = f": NCCL does not connect {what}{others}"
        if "apart" not in self.record.options:
            return where
        return (
            f"{where}, though it initialises on each by itself; which one is at fault is not known"
        )

    def _ended_as(self, outcome: str) -> list[Done]:
        return [each for each in self._done.values() if each.outcome == outcome]

    def _all_done(self, *, replace: bool) -> RoundEnding:
        stopped = [each for each in self._done.values() if each.outcome != "measured"]
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
        circles = {tuple(each.connecting) for each in self._done.values() if each.connecting}
        if not circles:
            return ""
        fewest = min(map(len, circles))
        named = sorted(each for each in circles if len(each) == fewest)
        if fewest >= max(self.workers, 2):
            return self._together(with_others=fewest > self.workers)
        if fewest == 1:
            numbers = ", ".join(str(circle[0]) for circle in named)
            return f": NCCL does not initialise on device {numbers}, even by itself"
        between = ", ".join(f"{first} and {second}" for first, second in named)
        return f": NCCL does not connect devices {between}, though it initialises on each by itself"

    def _sampled(self, metric: Metric) -> Sampled:
        events = self._samples[metric]
        first = next(iter(events.values()))
        return Sampled(
            node=self.node,
            round=self.record.round,
            group=self.group,
            probe=metric.probe,
            quantity=metric.quantity,
            scope=first.scope,
            iteration_ms=[
                [round(value, 4) for value in events[rank].iteration_ms] if rank in events else []
                for rank in range(max(events) + 1)
            ],
            taken_ms=_taken_ms(events),
            world_size=first.world_size,
            total_bytes=first.total_bytes,
            flop=first.flop,
            figures=min(events.values(), key=_micro_batch).figures,
        )


def _micro_batch(event: Measured) -> float:
    """Return which batch fits the device; what fits all is what fits the one with least room."""
    batch = event.figures.get("micro_batch")
    return batch if isinstance(batch, int | float) else 0


def _taken_ms(events: Mapping[int, Measured]) -> list[list[float]]:
    """Return what others took of each rank's times, nothing where they took none of any."""
    if not any(event.taken_ms for event in events.values()):
        return []
    return [
        [round(value, 4) for value in events[rank].taken_ms] if rank in events else []
        for rank in range(max(events) + 1)
    ]


def part_of(record: RoundStarted, node: str) -> tuple[list[str], Rendezvous] | None:
    """Return the node's group in a round and where it meets, None where it takes no part."""
    pairs = zip(record.groups, record.rendezvous, strict=True)
    return next(((group, meeting) for group, meeting in pairs if node in group), None)


def round_command(
    run_id: str, current: NodeRound, local_rank: int, *, far: Rendezvous, near: Rendezvous
) -> dict[str, object]:
    """Return what a worker is told of a round; the arguments are those of `process_groups`."""
    record = current.record
    return {
        "op": "round",
        "round": record.round,
        "timeout_s": record.deadline_s + 10.0,
        "local_size": current.workers,
        "probes": msgspec.to_builtins(record.probes),
        "options": record.options,
        "groups": process_groups(run_id, current, local_rank, far=far, near=near),
    }


def process_groups(
    run_id: str,
    current: NodeRound,
    local_rank: int,
    *,
    far: Rendezvous,
    near: Rendezvous,
) -> dict[str, dict[str, object]]:
    """Return the process group of each scope in which a worker has somebody beside it.

    Args:
        run_id: keeps the names of different runs apart.
        current: the round.
        local_rank: which of the node's workers.
        far: where the nodes of the group meet.
        near: where the workers of this node meet.
    """
    group, index, size = current.group, current.record.round, current.workers
    place = group.index(current.node)
    meeting = f"{run_id}/{index}/{group[0]}"
    groups = {}
    if size > 1:
        groups["node"] = _joined(near, f"{run_id}/{index}/node", local_rank, size)
    if size > 1 and len(group) > 1:
        groups["rail"] = {"rank": place, "world_size": len(group)}  # part of the pair's group
    if len(group) > 1:
        rank, world_size = place * size + local_rank, len(group) * size
        groups["pair"] = _joined(far, meeting, rank, world_size)
    return groups


def _joined(at: Rendezvous, prefix: str, rank: int, world_size: int) -> dict[str, object]:
    return {
        "rank": rank,
        "world_size": world_size,
        "prefix": prefix,
        "address": at.address,
        "port": at.port,
    }


def _outcome(aborted: GroupAborted) -> Outcome:
    return Outcome.TIMED_OUT if aborted.timed_out else Outcome.NOT_RUN
