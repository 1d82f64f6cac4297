# SPDX-License-Identifier: Apache-2.0
"""What a journal holds of the user's script: its runs, how it hung or failed, and why.

Written by the supervisor, by the monitor while the script runs, and by the post-mortem when it has
failed. The records of the check are in `records`.
"""

from __future__ import annotations

import re
from enum import IntEnum, StrEnum

from msgspec import field

from slurm_health.records.records import Count, Record

# What a diagnosis may find that others know by its name.
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
MOST_LINES = 4  # of evidence of one kind; the output has the rest
# Advice about a process that lives, by its number.
_OF_A_PROCESS = re.compile(r"kill -CONT \d+|/proc/")

_OF_THE_SCRIPT = frozenset({RANK_ELSEWHERE, DATA_LOADER_STUCK, OUT_OF_STEP})


class Attribution(StrEnum):
    """Whose doing a failure is, and so what helps."""

    NODE = "node fault"  # another node helps
    TRANSIENT = "transient"  # the same again helps
    USER = "user error"  # only a change of the script, its data or its options helps
    OUTSIDE = "ended from outside"  # somebody or a limit ended the job
    UNDECIDED = "undecided"


class Sureness(IntEnum):
    """How sure an inference is. No figure: nobody has counted how often each is right."""

    POSSIBLE = 1
    LIKELY = 2
    CERTAIN = 3


class ScriptStarted(Record, frozen=True, kw_only=True, tag="script_started"):
    """The user's script began, on `nodes` where these are not all of the job's.

    `restart` counts how often it was started again in this attempt of the job.
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


class FailurePlanned(Record, frozen=True, kw_only=True, tag="failure_planned"):
    """What is to be done about a failed script, why, and on what evidence.

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

    `first` is what happened first, where that is not the cause itself. `nodes` and `ranks` are
    where the cause showed; only `accused` are held at fault. `told` is what nodes of the job said
    of themselves that may matter, which did not answer, and what diagnosticians of others asked for
    that was not followed. `chain` has one `operator: inference` per step; `not_collected` says why
    a collector gave nothing, `failed` which collector or operator did not do its work, so that
    something may have been missed.
    """

    cause: str
    description: str
    attribution: str
    sureness: str
    first: str = ""
    nodes: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    accused: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    advice: str = ""
    chain: list[str] = field(default_factory=list)
    not_collected: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class ProgressSeen(Record, frozen=True, kw_only=True, tag="progress_seen"):
    """How far a script is whose ranks have no heartbeat, or none so far.

    `ranks` are those on `node`, the first of the job, `stopped` those of them that are stopped.
    `line` is the last line of the job's output that counted, empty where none does, `step` its
    number, and `age_s` how old it was. `beating`: a rank has a heartbeat now, which tells more.
    """

    node: str
    ranks: int = 0
    stopped: list[int] = field(default_factory=list)
    step: int = 0
    line: str = ""
    age_s: float = 0.0
    beating: bool = False


class HangFound(Record, frozen=True, kw_only=True, tag="hang_found"):
    """The script still runs and makes no progress: since when, where it hangs, as far as is known.

    `step` is the last one; `allowance_s` is how long a pause would have been usual. `line` is the
    last line of the job's output that counted steps, where output alone told of the standstill;
    `at_rest`: the ranks' main threads told of it, and no step is known. `beyond_script`: a rank
    there waits in the kernel, for storage, or its GPU never comes to an end.
    """

    stalled_s: float
    allowance_s: float
    step: int
    found: Diagnosed
    line: str = ""
    at_rest: bool = False
    beyond_script: bool = False

    @property
    def located(self) -> bool:
        """Whether it is likely, at least, where the training hangs."""
        found = self.found
        sure = Sureness[found.sureness.upper()] >= Sureness.LIKELY
        return sure and found.cause != NO_PROGRESS and bool(found.ranks or found.nodes)

    @property
    def is_of_script(self) -> bool:
        """Whether it hangs in the script's own code or data: the same again would hang again."""
        return self.found.cause in _OF_THE_SCRIPT and self.located and not self.beyond_script

    @property
    def stood_still(self) -> str:
        """By what it was told, and for how long by then."""
        if self.at_rest:
            return f"all ranks only waited for {self.stalled_s:.0f} s"
        what = "line that counts steps" if self.line else "step"
        return f"no {what} for {self.stalled_s:.0f} s after step {self.step}"


class HangOver(Record, frozen=True, kw_only=True, tag="hang_over"):
    """The training goes on by itself, after it had stood still for so long."""

    stalled_s: float
    step: int


class StragglerFound(Record, frozen=True, kw_only=True, tag="straggler_found"):
    """A rank takes longer for its own part of a step than the others do, in minutes on end.

    `found` says why; None if that is unknown.
    """

    node: str
    rank: int
    ratio: float
    own_ms: float
    usual_ms: float
    found: Diagnosed | None = None


class SlowdownFound(Record, frozen=True, kw_only=True, tag="slowdown_found"):
    """Steps take longer than before on all ranks, in minutes on end, and where that comes from."""

    step_ms: float
    usual_ms: float
    found: Diagnosed


class UnevenFound(Record, frozen=True, kw_only=True, tag="uneven_found"):
    """Stages of a pipeline, or batches, have more to compute than others; no rank is slow for it.

    `times`: so many times as long as the others the heaviest of them takes.
    """

    times: float
    found: Diagnosed


class LossFound(Record, frozen=True, kw_only=True, tag="loss_found"):
    """The loss of a training is no number any more, and its script goes on; `line` tells it."""

    line: str
    found: Diagnosed


# All of this page, in the order in which they stand here.
KINDS = tuple(kind for kind in Record.__subclasses__() if kind.__module__ == __name__)


def advice_afterwards(found: Diagnosed) -> str:
    """Return what helps once the script that hung has ended: its processes are gone."""
    if not found.advice:
        return ""
    if _OF_A_PROCESS.search(found.advice):
        return "should it hang again, look at it while it runs: slurm-health report names the rank"
    return f"should it hang again: {found.advice}"
