# SPDX-License-Identifier: Apache-2.0
"""What a report says about a job, its checks, their acts and its nodes: values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from slurm_health.records.record_codec import Entry
from slurm_health.records.records import ActionDone, ActionIntended, RunStarted, Sampled, Unchecked
from slurm_health.records.script_records import (
    Diagnosed,
    EventKind,
    TrainingEvent,
)
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict
from slurm_health.report.rounds import Hardware, RoundReport


class Progress(Enum):
    """How far an act got, as far as the journal tells."""

    INTENDED = "intended"  # begun; its end is not recorded
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Act:
    """One act on the nodes named, or on the job where there are none."""

    action: str
    progress: Progress
    nodes: tuple[str, ...] = ()
    reason: str = ""
    detail: str = ""


@dataclass(kw_only=True)
class _Intent:
    """An intent, and the results that were found for it."""

    record: ActionIntended
    results: list[ActionDone] = field(default_factory=list)

    def is_answered_by(self, done: ActionDone) -> bool:
        return done.action == self.record.action and set(done.nodes) <= set(self.record.nodes)


def acts_of(entries: Iterable[Entry]) -> tuple[Act, ...]:
    """Return the acts in the order they were intended.

    An intent written again by a master that took over counts once.

    Args:
        entries: those of the master, then those of the requeue helper. Their order counts, not
            their clocks.
    """
    intents: list[_Intent] = []
    for entry in entries:
        if isinstance(entry.record, ActionIntended):
            intents = [*_without_repeated(intents, entry.record), _Intent(record=entry.record)]
        elif isinstance(entry.record, ActionDone):
            _intent_of(intents, entry.record).results.append(entry.record)
    return tuple(act for intent in intents for act in _acts(intent))


def _without_repeated(intents: list[_Intent], again: ActionIntended) -> list[_Intent]:
    same = (again.action, again.nodes)
    return [
        intent
        for intent in intents
        if intent.results or (intent.record.action, intent.record.nodes) != same
    ]


def _intent_of(intents: list[_Intent], done: ActionDone) -> _Intent:
    """Return the newest intent that waits for this result; one is made up where there is none."""
    fitting = [intent for intent in intents if intent.is_answered_by(done)]
    waiting = [intent for intent in fitting if not intent.results]
    if waiting or fitting:
        return (waiting or fitting)[-1]
    intents.append(_Intent(record=ActionIntended(action=done.action, nodes=done.nodes)))
    return intents[-1]


def _acts(intent: _Intent) -> list[Act]:
    record = intent.record
    if not intent.results:
        return [_act(record, Progress.INTENDED, tuple(record.nodes))]
    rest = list(record.nodes)
    acts: list[Act] = []
    for done in intent.results:
        rest = [node for node in rest if node not in done.nodes]
        if _took_effect(done, record):
            if done.nodes or not record.nodes:
                acts.append(_act(record, Progress.DONE, tuple(done.nodes), detail=done.detail))
            continue
        nodes = tuple(done.nodes or rest)
        rest = rest if done.nodes else []
        acts.append(_act(record, Progress.FAILED, nodes, detail=done.detail))
    if rest:
        acts.append(_act(record, Progress.FAILED, tuple(rest), detail=intent.results[-1].detail))
    return acts


def _took_effect(done: ActionDone, intended: ActionIntended) -> bool:
    """Say whether the nodes of a result are those on which the act took effect.

    An act that failed as a whole gives a cause; one that reached only some nodes names those.
    """
    reached_some = set() < set(done.nodes) < set(intended.nodes)
    return done.succeeded or (reached_some and not done.detail)


def _act(
    record: ActionIntended, progress: Progress, nodes: tuple[str, ...], detail: str = ""
) -> Act:
    return Act(
        action=record.action, progress=progress, nodes=nodes, reason=record.reason, detail=detail
    )


class State(Enum):
    """How far a check got."""

    NOT_STARTED = "not_started"  # the journal holds no start, or not yet
    RUNNING = "running"
    STOPPED = "stopped"  # its master is gone and left it unfinished
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class RunEntries:
    """What was read of one run: its files' entries, and its place in the journal.

    `task` is `12_3` where a link of that name is to the job's directory, as the run's start says.
    `missing` says what of them is not there or cannot be read, a sentence each.
    """

    label: str
    job: str
    cluster: str
    task: str = ""
    master: Sequence[Entry] = ()
    nodes: Mapping[str, Sequence[Entry]] = field(default_factory=dict)
    supervisor: Sequence[Entry] = ()
    requeue: Sequence[Entry] = ()
    post_mortem: Sequence[Entry] = ()
    missing: tuple[str, ...] = ()
    restart: Sequence[Entry] = ()
    monitor: Sequence[Entry] = ()


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """One node: the verdict, None where there is none, its figures, and the run they are from.

    `figures` are the values of each metric, in its unit, as `session.measurement` has them.
    `hardware` is None where the node did not get to tell its parts.
    """

    node: str
    label: str
    verdict: NodeVerdict | None = None
    figures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    hardware: Hardware | None = None

    @property
    def level(self) -> Level | None:
        """Return the level of the verdict, None where there is none."""
        return self.verdict.level if self.verdict else None


@dataclass(frozen=True, kw_only=True)
class ScriptOutcome:
    """What became of the user's script. `exit_code` is None while no end is recorded."""

    name: str
    exit_code: int | None = None
    signal: int = 0
    duration_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened, `after_s` seconds after the start of the check.

    `what` is the kind of the journal's record. `detail` is what the record says in words: a
    reason, a cause, a result.
    """

    after_s: float
    what: str
    action: str = ""
    nodes: tuple[str, ...] = ()
    succeeded: bool | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """One check: of one attempt of a job, or one of several in the same attempt.

    `queued_s` is how long its attempt waited for its nodes, as far as clocks agree. `duration_s` is
    from the master's first record to its verdict. `nodes` are in the order of the run. `note` says
    how far an unfinished check got. `superseded`: a later check exists. `unchecked` says why its
    nodes could not be checked, and what to do. `post_mortem` says why the script failed, `events`
    are what was seen while it ran. `requeued` says how others put its job back into the queue.
    `so_far` says how far a script without a heartbeat is that still runs. `missing` says what of
    its journal is not there or cannot be read. `measured` has the figures of each round and node,
    with any partner.
    """

    label: str
    attempt: int
    check: int
    state: State
    note: str = ""
    superseded: bool = False
    started: RunStarted | None = None
    started_s: float | None = None
    queued_s: float | None = None
    rounds: int = 0
    duration_s: float | None = None
    judged: bool = False
    nodes: tuple[NodeReport, ...] = ()
    paths: tuple[LinkVerdict, ...] = ()
    leaves: tuple[LinkVerdict, ...] = ()
    floors: Mapping[str, float] = field(default_factory=dict)
    unseen: str = ""
    acts: tuple[Act, ...] = ()
    disposition: str = ""
    reason: str = ""
    unchecked: Unchecked | None = None
    exit_code: int | None = None
    script: ScriptOutcome | None = None
    post_mortem: Diagnosed | None = None
    events: tuple[TrainingEvent, ...] = ()
    requeued: str = ""
    so_far: str = ""
    timeline: tuple[Event, ...] = ()
    samples: tuple[Sampled, ...] = ()
    measured: Mapping[tuple[int, str], Mapping[str, float]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    each_round: tuple[RoundReport, ...] = ()

    @property
    def hang(self) -> TrainingEvent | None:
        """Return the hang that is not over, None where there is none."""
        last: TrainingEvent | None = None
        for event in self.events:
            if event.event is EventKind.HANG:
                last = event
            elif event.event is EventKind.HANG_OVER:
                last = None
        return last

    def named(self, level: Level) -> tuple[str, ...]:
        """Return the nodes at `level`, in the order of the run."""
        return tuple(node.node for node in self.nodes if node.level is level)


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """All checks of one job, oldest first, and what they say together about each node.

    A node's row is its latest verdict: a node that was left behind keeps its own, and
    *inconclusive* never replaces what an earlier check had found faulty or slow. `waits` is what
    Slurm says of a job that waits for its next attempt, where it was asked, and `ended` of one
    whose script the journal only saw begin; `cancelled_by` says who cancelled it, where Slurm
    keeps accounts.
    """

    job: str
    cluster: str
    partition: str = ""
    script: str = ""
    waits: str = ""
    ended: str = ""
    cancelled_by: str = ""
    runs: tuple[RunReport, ...] = ()
    nodes: tuple[NodeReport, ...] = ()
    paths: tuple[LinkVerdict, ...] = ()
    leaves: tuple[LinkVerdict, ...] = ()
