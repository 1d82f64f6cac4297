# SPDX-License-Identifier: Apache-2.0
"""The story of a job: all facts of a report. Its JSON has the same names."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from slurm_health.records.record_codec import Entry
from slurm_health.records.records import RunStarted, StorageTested, Unchecked
from slurm_health.records.script_records import (
    Diagnosed,
    EventKind,
    ProgressSeen,
    TrainingEvent,
)
from slurm_health.records.verdict import Level, LinkVerdict, Outcome, StorageVerdict

WORST_FIRST = (Level.FAULTY, Level.SLOW, Level.INCONCLUSIVE, None, Level.HEALTHY)


class State(Enum):
    """How far a check got."""

    NOT_STARTED = "not_started"  # the journal holds no start, or not yet
    RUNNING = "running"
    STOPPED = "stopped"  # its master is gone and left it unfinished
    FINISHED = "finished"


class Progress(Enum):
    """How far an act got, as far as the journal shows."""

    INTENDED = "intended"  # begun; its end is not recorded
    DONE = "done"
    FAILED = "failed"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as the driver names it. `notes` are its own reports under load."""

    index: int
    uuid: str
    pci_address: str
    notes: tuple[str, ...] = ()


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """A node's processor or GPUs, and the network interface to its peers."""

    model: str
    interface: str
    devices: tuple[Device, ...] = ()


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its verdict from `run` (level None: there is none), and its figures.

    `slowdown` is relative to its peers, `probability` is that of the verdict. `figures` are named
    by probe and unit, `allgather_gb_per_s`, `storage` are its tests of paths. `hardware` is None if
    its workers never were ready. `held` is what kept the node after the job had ended.
    """

    node: str
    run: str
    level: Level | None = None
    reason: str = ""
    component: str = ""
    slowdown: float | None = None
    probability: float | None = None
    evidence: tuple[str, ...] = ()
    hardware: Hardware | None = None
    figures: dict[str, tuple[float, ...]] = {}
    held: str = ""
    storage: tuple[StorageTested, ...] = ()

    @property
    def is_bad(self) -> bool:
        """Whether a verdict says that it is not well."""
        return self.level not in (Level.HEALTHY, None)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One group of one round. `outcome` is None while none of its nodes has reported.

    `elapsed_s` is how long the round took for each of `nodes`, None for one that has not reported.
    `details` are the words of its nodes and of the master, `silent` the nodes that did not answer.
    """

    nodes: tuple[str, ...]
    outcome: Outcome | None
    elapsed_s: tuple[float | None, ...]
    details: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    allgather_gb_per_s: float | None = None


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round, `after_s` after the start of the check; `duration_s` is None while it lasts.

    `round` counts the rounds of all phases; `name` is for people: `solo test`, `round 0` of pairs.
    """

    round: int
    name: str
    phase: str
    probes: tuple[str, ...]
    after_s: float
    duration_s: float | None
    groups: tuple[Group, ...]


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One act on the nodes named, or on the job if there are none."""

    action: str
    progress: Progress
    nodes: tuple[str, ...] = ()
    reason: str = ""
    detail: str = ""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """The user's script, as it was started last, on `nodes` if not on all.

    `exit_code` is None while no end is recorded; `restarts` counts the starts before in this
    attempt of the job, `restarted_after` has the diagnoses that led to them. `seen` is its
    progress at `seen_s`, `steps` is the number of steps it is to make, `step_ms` its pace; 0:
    unknown. `unwatched` are times, from its start on, in which its watch recorded nothing.
    """

    name: str
    started_s: float | None = None
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    restarted_after: tuple[Diagnosed, ...] = ()
    exit_code: int | None = None
    signal: int = 0
    duration_s: float | None = None
    seen: ProgressSeen | None = None
    seen_s: float = 0.0
    steps: int = 0
    step_ms: float = 0.0
    unwatched: tuple[tuple[float, float], ...] = ()


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event in words, `after_s` after the start of the check.

    `event` is the kind of the journal's record.
    """

    after_s: float
    event: str
    text: str
    action: str = ""
    nodes: tuple[str, ...] = ()
    succeeded: bool | None = None


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the job's life: queue, check, training or hang; times since the epoch."""

    phase: str
    begin_s: float
    end_s: float


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One check, of one attempt of a job or one of several in it, and the script after it.

    `attempt` counts from 0, as Slurm's restarts do. `queued_s` is how long the attempt waited for
    its nodes, as far as clocks agree; `duration_s` is from the start of the check to its verdict.
    `note` is how far an unfinished check got. `superseded`: a later check exists. `requeued` is how
    others put the job back into the queue. `missing` is what its journal lacks. `events` are those
    of the training, those of its last start from `since_start` on. `unseen` says what was not
    measured.
    """

    run: str
    attempt: int
    check: int
    state: State
    note: str = ""
    superseded: bool = False
    started: RunStarted | None = None
    started_s: float | None = None
    queued_s: float | None = None
    duration_s: float | None = None
    judged: bool = False
    nodes: tuple[Node, ...] = ()
    paths: tuple[LinkVerdict, ...] = ()
    leaves: tuple[LinkVerdict, ...] = ()
    floors: dict[str, float] = {}
    unseen: str = ""
    storage: tuple[StorageVerdict, ...] = ()
    actions: tuple[Act, ...] = ()
    disposition: str = ""
    reason: str = ""
    exit_code: int | None = None
    unchecked: Unchecked | None = None
    script: Script | None = None
    post_mortem: Diagnosed | None = None
    events: tuple[TrainingEvent, ...] = ()
    since_start: int = 0
    requeued: str = ""
    timeline: tuple[Event, ...] = ()
    rounds: tuple[Round, ...] = ()
    life: tuple[Phase, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def hang(self) -> TrainingEvent | None:
        """The hang of the last start of the script that is not over, None if there is none."""
        hang = None
        for event in self.events[self.since_start :]:
            if event.event is EventKind.HANG:
                hang = event
            elif event.event is EventKind.HANG_OVER:
                hang = None
        return hang

    @property
    def script_runs(self) -> bool:
        """Whether the script has not ended, as far as the journal shows."""
        running = self.script is not None and self.script.exit_code is None
        return running and not (self.superseded or self.post_mortem or self.requeued)

    def named(self, level: Level) -> tuple[str, ...]:
        """Return the nodes at `level`, in the order of the run."""
        return tuple(node.node for node in self.nodes if node.level is level)

    def acted_on(self, action: str) -> tuple[str, ...]:
        """Return the nodes on which an action took effect."""
        done = (a for a in self.actions if a.action == action and a.progress is Progress.DONE)
        return tuple(node for act in done for node in act.nodes)


class NodeNow(msgspec.Struct, frozen=True, kw_only=True):
    """A node that Slurm keeps out of use now; `reason` has the user and the time."""

    node: str
    state: str
    reason: str


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of one job, oldest first, and its nodes, paths and leaf switches by all of them.

    A node's row is its latest verdict: a node that was left behind keeps its own, and
    *inconclusive* never replaces an earlier fault. `now_s` is the time of the story.

    By Slurm, if it was asked and knows: `slurm_state` of the job, `over_in_slurm`, how it `waits`
    for its next attempt, how it `ended` if no record has that, the user in `cancelled_by`, and the
    nodes that are `out_of_use`.
    """

    job: str
    cluster: str
    partition: str = ""
    name: str = ""
    script: str = ""
    user: str = ""
    now_s: float | None = None
    slurm_state: str = ""
    over_in_slurm: bool | None = None
    waits: str = ""
    ended: str = ""
    cancelled_by: str = ""
    runs: tuple[Run, ...] = ()
    nodes: tuple[Node, ...] = ()
    paths: tuple[LinkVerdict, ...] = ()
    leaves: tuple[LinkVerdict, ...] = ()
    out_of_use: tuple[NodeNow, ...] = ()

    @property
    def last(self) -> Run:
        """The last check."""
        return self.runs[-1]

    @property
    def training(self) -> Run:
        """The check of the last attempt that its script belongs to, the last check if none has one.

        A script that is started again, or that runs a check itself, belongs to the check that it
        was started after.
        """
        here = [run for run in self.runs if run.attempt == self.last.attempt]
        with_script = (run for run in reversed(here) if run.script or run.post_mortem or run.events)
        return next(with_script, self.last)

    @property
    def left(self) -> tuple[Node, ...]:
        """The bad nodes that the job no longer has, or that it gave back."""
        kept = {node.node for node in self.last.nodes} - {*self.last.acted_on("drop")}
        return tuple(node for node in self.nodes if node.is_bad and node.node not in kept)


class RunEntries(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of one run's files, and its place in the journal.

    `task` is `12_3` if a link of that name leads to the job's directory, as the run's start says.
    `missing` has a sentence for each file or line that could not be read.
    """

    label: str
    job: str
    cluster: str
    task: str = ""
    master: Sequence[Entry] = ()
    nodes: dict[str, Sequence[Entry]] = {}
    supervisor: Sequence[Entry] = ()
    requeue: Sequence[Entry] = ()
    post_mortem: Sequence[Entry] = ()
    restart: Sequence[Entry] = ()
    monitor: Sequence[Entry] = ()
    missing: tuple[str, ...] = ()

    @property
    def written(self) -> list[Entry]:
        """The entries about the job as a whole, by time."""
        writers = (self.master, self.supervisor, self.requeue, self.post_mortem)
        entries = [entry for writer in writers for entry in writer]
        return sorted([*entries, *self.restart, *self.monitor], key=lambda entry: entry.time_s)
