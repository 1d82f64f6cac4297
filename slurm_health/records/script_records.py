# SPDX-License-Identifier: Apache-2.0
"""The records of the user's script: its starts, how it hung or failed, and why.

The supervisor writes them, the monitor while the script runs, and the post-mortem after a failure.
The records of the check are in `records`.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

from msgspec import field

from slurm_health.records.records import Count, Record

# Causes of a diagnosis that other modules know by name.
SCRIPT_FAILED = "script-failed"
REQUEUED = "requeued"  # by others: the job goes on, and nothing failed
HUNG = "hung-until-it-was-ended"
RANK_FAILED = "rank-failed"
RANKS_WAITED = "ranks-waited"
NO_PROGRESS = "no-progress"  # while the script runs
RANK_GONE = "rank-gone"  # and others wait for it
NEVER_ENTERED = "never-entered"
SLOWER_STEPS = "slower-steps"  # while the script runs
SLOWER_RANK = "slower-rank"
OUT_OF_STEP = "rank-out-of-step"
RANK_ELSEWHERE = "rank-elsewhere"
DATA_LOADER_STUCK = "data-loader-stuck"
TIME_LIMIT = "the job reached its time limit"
# Slurm's reason for a job whose script it could not start.
LAUNCH_FAILED = "launch_failed_requeued_held"
LAUNCH_FAILED_TEXT = (
    "Slurm could not start the job's script on a node, has put the job back, and holds it until it"
    " is released"
)
LAUNCH_FAILED_ADVICE = (
    "see which node it was (sacct --duplicates -o JobID,NodeList,State; sinfo -R) and tell your"
    " administrator; then exclude it (scontrol update JobId=..., ExcNodeList=...) and release the"
    " job (scontrol release)"
)
MOST_LINES = 4  # of evidence of one kind; the output has the rest

_OF_THE_SCRIPT = frozenset({RANK_ELSEWHERE, DATA_LOADER_STUCK, OUT_OF_STEP})


class Attribution(StrEnum):
    """The blame for a failure, which decides what helps."""

    NODE = "node fault"  # another node helps
    TRANSIENT = "transient"  # the same start again helps
    USER = "user error"  # only a change of the script, its data or its options helps
    OUTSIDE = "ended from outside"  # a user or a limit ended the job
    UNDECIDED = "undecided"


class Sureness(IntEnum):
    """How sure an inference is, without a figure: their error rates are unknown."""

    POSSIBLE = 1
    LIKELY = 2
    CERTAIN = 3


class ScriptStarted(Record, frozen=True, kw_only=True, tag="script_started"):
    """The user's script began, on `nodes` if these are not all of the job's.

    `restart` counts its restarts in this attempt of the job.
    """

    script: str
    pid: int
    restart: Count = 0
    nodes: list[str] = field(default_factory=list)


class ScriptEnded(Record, frozen=True, kw_only=True, tag="script_ended"):
    """The user's script ended, with `exit_code` or by `signal` (0: none)."""

    exit_code: int
    signal: int = 0
    duration_s: float


class WorkersEnded(Record, frozen=True, kw_only=True, tag="workers_ended"):
    """The torchrun of a node has ended, by itself or because another one has.

    `output` is the last that it and its workers wrote to standard error.
    """

    node: str
    exit_code: int
    output: str = ""


class WorkersEnding(Record, frozen=True, kw_only=True, tag="workers_ending"):
    """The workers of a node are being ended: a sign of life, written until they have ended."""

    node: str


class TrainingPlanned(Record, frozen=True, kw_only=True, tag="training_planned"):
    """What the processes of a training do next, on `nodes` in the order of their ranks.

    `plan` is `start` after a check, and `restart`, `check` or `stop` after a failure. `left_out`
    has why other nodes do not train, `addresses` those of nodes as far as they are known.
    """

    plan: str
    nodes: list[str] = field(default_factory=list)
    reason: str = ""
    left_out: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)


class FailurePlanned(Record, frozen=True, kw_only=True, tag="failure_planned"):
    """The plan for a failed script, with reason and evidence.

    `plan` is `stop`, `restart`, `check` or `leave`. It would be restart number `restart` of the
    `max_restarts` that its user allows. `nodes` are those held at fault.
    """

    plan: str
    reason: str
    restart: Count
    max_restarts: Count
    evidence: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)


class Diagnosed(Record, frozen=True, kw_only=True, tag="diagnosed"):
    """Why the script failed, as far as what was collected after its end says it.

    `error` is the exception of the ranks at which it failed, as their program wrote it, and `place`
    the line of the script that raised it, `ddp.py:28`; both are empty where there is none.
    `first` is what happened first, where that is not the cause itself. `nodes` and `ranks` are
    where the cause showed; only `accused` are held at fault. `told` is what nodes of the job said
    of themselves that may matter, which did not answer, and what diagnosticians of others asked for
    that was not followed. `advises_process`: the advice is about a process that lives. `chain` has
    one `operator: inference` per step; `not_collected` says why a collector gave nothing, `failed`
    which collector or operator did not do its work, so that something may have been missed.
    """

    cause: str
    description: str
    attribution: str
    sureness: str
    error: str = ""
    place: str = ""
    first: str = ""
    nodes: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    accused: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    advice: str = ""
    advises_process: bool = False
    chain: list[str] = field(default_factory=list)
    not_collected: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class ProgressSeen(Record, frozen=True, kw_only=True, tag="progress_seen"):
    """How far a script is.

    `node` is the first of the job. `ranks` is how many there are, `stopped` are those that are
    stopped, on the nodes `stopped_on`. `step` is the latest, by their heartbeats or by `line`, the
    last line of the job's output that counted, and it was `age_s` old. `beating`: a rank has a
    heartbeat. `saved` is the last line of the output that names a checkpoint, `saved_age_s` old;
    `waits` is what the others wait for while there is no progress, though it may go on.
    """

    node: str
    ranks: int = 0
    stopped: list[int] = field(default_factory=list)
    stopped_on: list[str] = field(default_factory=list)
    step: int = 0
    line: str = ""
    age_s: float = 0.0
    beating: bool = False
    saved: str = ""
    saved_age_s: float = 0.0
    waits: str = ""


class EventKind(StrEnum):
    """What the monitor can see in a training while its script runs."""

    HANG = "hang"
    HANG_OVER = "hang over"  # the training goes on by itself
    STRAGGLER = "straggler"  # a rank takes longer for its own part of a step, for minutes
    SLOWDOWN = "slowdown"  # steps take longer than before on all ranks, for minutes
    UNEVEN = "uneven work"  # stages or batches have more to compute than others; no rank is slow
    LOSS = "loss"  # it is NaN or infinite, and the script goes on


class TrainingEvent(Record, frozen=True, kw_only=True, tag="training_event"):
    """What the monitor saw in a training that runs, where, and why as far as it can infer that.

    `step` is the last one (0: not known), `line` the line of the job's output that shows it. The
    figures that an event has depend on its kind; the others are 0.

    HANG: no progress for `stalled_s`, where pauses of `usual_s` are usual. `line` counts steps, if
    output alone shows the standstill; `at_rest`: the ranks' main threads show it, no step is known.
    `beyond_script`: a rank there waits in the kernel, for storage, or its GPU never finishes.
    HANG_OVER: it went on after `stalled_s`.
    STRAGGLER: its own part of a step takes `took_ms`, that of the others `usual_ms`; `ratio` is one
    by the other. SLOWDOWN: a step takes `took_ms`, and took `usual_ms` before.
    UNEVEN: the heaviest takes `ratio` times as long as the others.
    """

    event: EventKind
    step: Count = 0
    nodes: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    stalled_s: float = 0.0
    usual_s: float = 0.0
    took_ms: float = 0.0
    usual_ms: float = 0.0
    ratio: float = 0.0
    line: str = ""
    at_rest: bool = False
    beyond_script: bool = False
    diagnosed: Diagnosed | None = None

    @property
    def located(self) -> bool:
        """Whether it is likely, at least, where a training hangs."""
        cause = self.diagnosed
        if cause is None or cause.cause == NO_PROGRESS or not (cause.ranks or cause.nodes):
            return False
        return Sureness[cause.sureness.upper()] >= Sureness.LIKELY

    @property
    def is_of_script(self) -> bool:
        """Whether it hangs in the script's own code or data: the same again would hang again."""
        in_script = self.diagnosed is not None and self.diagnosed.cause in _OF_THE_SCRIPT
        return in_script and self.located and not self.beyond_script

    @property
    def description(self) -> str:
        """What was inferred, empty where nothing was."""
        return self.diagnosed.description if self.diagnosed else ""


# All of this page, in the order in which they stand here.
KINDS = tuple(kind for kind in Record.__subclasses__() if kind.__module__ == __name__)


def advice_afterwards(diagnosed: Diagnosed) -> str:
    """Return the advice after the end of a script that hung: its processes are gone."""
    if not diagnosed.advice:
        return ""
    if diagnosed.advises_process:
        return "should it hang again, look at it while it runs: slurm-health report names the rank"
    return f"should it hang again: {diagnosed.advice}"
