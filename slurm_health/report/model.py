# SPDX-License-Identifier: Apache-2.0
"""What a report says about a job, its checks and its nodes: values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from slurm_health.records.record_codec import Entry
from slurm_health.records.records import RunStarted, Sampled, Unchecked
from slurm_health.records.script_records import (
    Diagnosed,
    HangFound,
    HangOver,
    LossFound,
    SlowdownFound,
    StragglerFound,
    UnevenFound,
)
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict
from slurm_health.report.acts import Act
from slurm_health.report.measured import Figure, Hardware, RoundReport


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

    `hardware` is None where the node did not get to tell its parts.
    """

    node: str
    label: str
    verdict: NodeVerdict | None = None
    figures: tuple[Figure, ...] = ()
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
class Hang:
    """A hang while the script ran; `over` is None where it did not go on by itself."""

    hang: HangFound
    over: HangOver | None = None


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
    nodes could not be checked, and what to do. `post_mortem` says why the script failed. `hangs`,
    `stragglers`, `slowdowns`, `unevenness` and `losses` (that are no numbers) are what was seen
    while it ran. `requeued` says how others than this check put its job back into the queue.
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
    hangs: tuple[Hang, ...] = ()
    stragglers: tuple[StragglerFound, ...] = ()
    slowdowns: tuple[SlowdownFound, ...] = ()
    unevenness: tuple[UnevenFound, ...] = ()
    losses: tuple[LossFound, ...] = ()
    requeued: str = ""
    so_far: str = ""
    timeline: tuple[Event, ...] = ()
    samples: tuple[Sampled, ...] = ()
    measured: Mapping[tuple[int, str], Mapping[str, float]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    each_round: tuple[RoundReport, ...] = ()

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
