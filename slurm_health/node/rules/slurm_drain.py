# SPDX-License-Identifier: Apache-2.0
"""Nodes that Slurm drained or downed by itself: what its reason means, and what lifts it. Pure.

`slurm_reasons` has the reasons. Who signed one proves nothing: `scontrol reconfigure` signs Slurm's
own anew. Its text and its time count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from slurm_health.node.rules.recovery import DrainRecord
from slurm_health.node.rules.slurm_reasons import (
    BY_NAME,
    COMPLETING,
    Return,
    SlurmReason,
    job_in,
    kind_of,
)
from slurm_health.records.nodeset import fold
from slurm_health.records.text import counted, cut, one_line

_DAY_S = 86_400.0
# Nodes that Slurm took within so long of one another have a common cause, if they are so many.
WAVE_S = 3600.0
WAVE = 3
# So many nodes after jobs of one job, array or user name it.
CULPRIT = 2
# Looks in a row, apart, that measure no obstacle.
PASSES = 2
# A job that ends takes seconds; after this it is reported.
COMPLETING_S = 120.0
# From when a hook has seen the processes until Slurm drains: UnkillableStepProgram ends within 6 s,
# right before, and an Epilog comes after the drain.
_BINDS_S = (-300.0, 30.0)
# Evidence for which no drain has come is kept so long.
KEPT_S = 900.0
_SHOWN = 200
_STATES = {
    "F": "in a frozen cgroup",
    "T": "stopped",
    "Z": "ended, not collected by its parent",
}
# Ends of jobs that drain a node although no process is left.
_BY_JOBS = ("epilog-error", "job-environment")


# --- what is known of one drain ------------------------------------------------------------------


class Resource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A mount, or a GPU by its index, that a process waits for or holds.

    `kind` is the type of the mount, `source` its device or server.
    """

    name: str
    kind: str = ""
    source: str = ""
    gpu: int | None = None

    @property
    def text(self) -> str:
        """The mount point with its source, or the GPU."""
        return f"{self.name} ({self.source or self.kind})" if self.kind else self.name


class HeldProcess(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process that outlives its job.

    Args:
        pid: with `start_ticks`, it is this process and no later one of the same number.
        start_ticks: its start, by the kernel's clock.
        name: of its program.
        uid: its user.
        state: its letter in /proc, F in a frozen cgroup.
        wait: the function of the kernel that it waits in.
        stack: of the kernel, the innermost function first.
        killed: SIGKILL has been sent and does not end it.
        file: that it waits for, if its system call names an open one.
        resources: that it waits for or holds.
        gpu_bytes: of GPU memory that it has not freed.
    """

    pid: int
    start_ticks: int
    name: str
    uid: int = 0
    state: str = ""
    wait: str = ""
    stack: tuple[str, ...] = ()
    killed: bool = False
    file: str = ""
    resources: tuple[Resource, ...] = ()
    gpu_bytes: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """What identifies it in this boot."""
        return self.pid, self.start_ticks

    @property
    def text(self) -> str:
        """Its name, and what keeps it."""
        state = _STATES.get(self.state)
        where = f" in {self.wait}" if self.wait and not state else ""
        gpu = f", holds {self.gpu_bytes / 1e9:.3g} GB of GPU memory" if self.gpu_bytes else ""
        return f"{self.name}({self.pid}) {state or f'in {self.state} state'}{where}{gpu}"


class SlurmDrain(DrainRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A drain of Slurm's own on one node, or a job that stays in COMPLETING there.

    `reason` is its text without signature, empty as long as only a hook has seen the processes;
    `time_s` is when.

    Args:
        since: its time as Slurm writes it: with the reason it identifies the drain.
        kind: name of the row of the table.
        state: of the node in Slurm.
        job: after which job; 0 if unknown.
        uid: the job's user; -1 if unknown.
        array: the job's array; 0 for none.
        held: the processes that were left, gone or not.
        log: slurmd's own lines of it.
        stuck: what still keeps the node, from its last health check.
        foreign: someone has set its reason anew, or edited it: nothing of ours lifts it, whatever
            the reason becomes, until the node has been in service.
        again: a drain of Slurm's was lifted here within a day before.
        over_s: when its node was back in service; 0 for not yet.
        lifted: slurm-health returned it.
    """

    since: str = ""
    kind: str = ""
    state: str = ""
    job: int = 0
    uid: int = -1
    array: int = 0
    held: tuple[HeldProcess, ...] = ()
    log: tuple[str, ...] = ()
    stuck: str = ""
    foreign: bool = False
    again: bool = False
    over_s: float = 0.0
    lifted: bool = False

    @property
    def row(self) -> SlurmReason:
        """The row of its reason."""
        return BY_NAME[self.kind]

    @property
    def resources(self) -> tuple[Resource, ...]:
        """What its processes waited for or held."""
        return tuple(dict.fromkeys(item for one in self.held for item in one.resources))


def bound(
    record: SlurmDrain | None, reason: str, since: str, since_s: float, node: str
) -> SlurmDrain | None:
    """Return the record of the drain that Slurm shows; None for an administrator's.

    Processes that a hook saw just before are its evidence. The same text with another time was set
    by someone, and so was an unknown one: the record says so. Another text of Slurm's own is
    another drain.
    """
    row = kind_of(reason)
    if record is not None and record.over_s:
        record = None  # of an earlier drain
    if row is None:
        edited = record is not None and bool(record.reason)
        return msgspec.structs.replace(record, foreign=True) if record and edited else None
    new = SlurmDrain(
        node=node,
        reason=reason,
        retest=(),
        time_s=since_s,
        since=since,
        kind=row.name,
        job=job_in(reason),
        confirmed=True,
    )
    if record is None:
        return new
    if record.foreign or (record.reason, record.since) == (reason, since):
        return record
    low_s, high_s = _BINDS_S
    if record.reason:
        return msgspec.structs.replace(record, foreign=True) if record.reason == reason else new
    if new.job not in (0, record.job) or row.lifted_by is not Return.PROCESSES:
        return new
    # Slurm sets this reason right after its hook: later, someone has set it anew.
    return msgspec.structs.replace(
        record,
        reason=reason,
        since=since,
        time_s=since_s,
        kind=row.name,
        confirmed=True,
        foreign=not low_s <= since_s - record.time_s <= high_s,
    )


def why_not_lift(drain: SlurmDrain, *, setting: str, others: Iterable[SlurmDrain]) -> str:
    """Return why a drain is not lifted now; empty if it is.

    Args:
        drain: with the passes so far, and the obstacle of the last look.
        setting: `[recovery] slurm_drains`.
        others: drains of Slurm's on other nodes, asked only if all else holds.
    """
    if drain.row.lifted_by in (Return.ADMINISTRATOR, Return.SLURM):
        return str(drain.row.lifted_by.value)
    if drain.stuck:
        return drain.stuck
    if drain.foreign:
        return administrator_needed(drain, setting=setting, others=())
    if drain.passes < PASSES:
        return f"pass {drain.passes} of {PASSES}"
    if setting != "lift":
        return f"slurm_drains = {setting}"
    return administrator_needed(drain, setting=setting, others=others)


def administrator_needed(drain: SlurmDrain, *, setting: str, others: Iterable[SlurmDrain]) -> str:
    """Return what an administrator does about a node; empty if it returns by itself."""
    rule = drain.row.lifted_by
    if rule in (Return.ADMINISTRATOR, Return.SLURM):
        first = "an administrator resumes it: " if rule is Return.ADMINISTRATOR else ""
        return f"{first}{drain.row.advice}"
    if drain.foreign:
        return "an administrator resumes it: someone has set or edited its reason since"
    if "INVAL" in drain.state:
        return f"{drain.row.advice}; Slurm resumes no node that it calls INVAL"
    if drain.again:
        return "an administrator decides: it was returned once within a day"
    if (shared := wave(drain, others)) is not None:
        return f"an administrator decides: {shared.text}"
    if setting == "lift":
        return ""
    resume = f"scontrol update NodeName={drain.node} State=RESUME"
    if drain.passes >= PASSES and not drain.stuck:
        return f"may return now: {resume}"
    return f"may return when {_until(drain)}: {resume}"


def _until(drain: SlurmDrain) -> str:
    rule = drain.row.lifted_by
    if rule is not Return.PROCESSES:
        return str(rule.value)
    names = " and ".join(item.name for item in drain.resources[:2])
    gone = "those processes are gone" if len(drain.held) > 1 else "that process is gone"
    return f"{gone} and {names} answers" if names else gone


# --- what several drains have in common ----------------------------------------------------------


def _causes(drain: SlurmDrain) -> Iterator[tuple[str, str]]:
    """Yield what a drain may share with others, with its words."""
    yield f"reason {drain.kind}", drain.row.meaning
    for item in drain.resources:
        if item.kind:
            yield f"mount {item.source} {item.name}", f"all wait for {item.text}"
    if drain.job:
        yield f"job {drain.array or drain.job}", f"all after job {drain.array or drain.job}"
    if drain.uid > 0:
        yield f"user {drain.uid}", "all after jobs of one user"


class Wave(msgspec.Struct, frozen=True, kw_only=True):
    """The common cause of drains of several nodes within an hour."""

    cause: str
    nodes: str
    text: str


def wave(drain: SlurmDrain, others: Iterable[SlurmDrain]) -> Wave | None:
    """Return the wave that a drain belongs to; None if it stands alone.

    Of several, the narrowest counts: a mount, a job or a user says more than the reason.
    """
    near = [other for other in others if abs(other.time_s - drain.time_s) <= WAVE_S]
    causes = [(other.node, dict(_causes(other))) for other in near]
    last = None
    for cause, words in _causes(drain):
        nodes = {node for node, shared in causes if cause in shared} | {drain.node}
        if len(nodes) >= WAVE:
            text = f"{counted(len(nodes), 'node')} within the hour: {words}; none is returned"
            last = Wave(cause=cause, nodes=fold(sorted(nodes)), text=text)
    return last


def culprits(
    drains: Iterable[SlurmDrain], now_s: float, name_of: Callable[[int], str] = str
) -> dict[str, tuple[SlurmDrain, ...]]:
    """Return the jobs, arrays and users whose endings drained several nodes within a day.

    What a node does by itself, such as a boot, is no job's doing.
    """
    after: dict[str, dict[str, SlurmDrain]] = {}
    for drain in drains:
        ends = drain.row.lifted_by in (Return.PROCESSES, Return.SLURM) or drain.kind in _BY_JOBS
        if not ends or now_s - drain.time_s > _DAY_S:
            continue
        if drain.job:
            job = f"array {drain.array}" if drain.array else f"job {drain.job}"
            after.setdefault(job, {})[drain.node] = drain
        if drain.uid > 0:
            after.setdefault(f"user {name_of(drain.uid)}", {})[drain.node] = drain
    several = {name: nodes for name, nodes in after.items() if len(nodes) >= CULPRIT}
    jobs = [nodes.keys() for name, nodes in several.items() if not name.startswith("user ")]
    return {
        name: tuple(nodes.values())
        for name, nodes in several.items()
        if not name.startswith("user ") or nodes.keys() not in jobs
    }


def culprit_text(name: str, drains: Sequence[SlurmDrain]) -> str:
    """Return which nodes a job, an array or a user cost, and what its owner can do."""
    nodes = fold(sorted(drain.node for drain in drains))
    return f"{name} left {counted(len(drains), 'node')} unusable ({nodes}): {advice_for(drains)}"


def advice_for(drains: Sequence[SlurmDrain]) -> str:
    """Return what the owner of jobs that drained nodes can do."""
    waits = {process.wait for drain in drains for process in drain.held}
    mounts = [item for drain in drains for item in drain.resources if item.kind]
    if any("dump" in wait for wait in waits):
        return "its core dumps take longer than UnkillableStepTimeout: ulimit -c 0"
    if mounts:
        return f"its processes wait for {mounts[0].text} as they end: write checkpoints elsewhere"
    return "its processes need longer to end than Slurm waits: end them sooner, or raise KillWait"


def sentence(
    drain: SlurmDrain,
    *,
    setting: str,
    now_s: float,
    others: Iterable[SlurmDrain] = (),
    name_of: Callable[[int], str] = str,
) -> str:
    """Return what happened to a node, what was found, and what returns it: the only wording."""
    took_s = max(0.0, now_s - drain.time_s)
    age = f"{took_s / 3600:.0f} h" if took_s >= 2 * 3600 else f"{took_s / 60:.0f} min"
    of = f" of {name_of(drain.uid)}" if drain.uid > 0 else ""
    job = f"job {drain.job}{of}" if drain.job else ""
    if drain.kind == COMPLETING.name:
        head = f"{job} ended {age} ago and stays in COMPLETING"
    elif not drain.reason:
        head = f"{job} left processes {age} ago that cannot be killed"
    else:
        out = "down" if "DOWN" in drain.state else "drained"
        text = re.sub(r" \(JobId=.*?\)", "", drain.reason)
        head = f"{out} by Slurm {age} ({', '.join(filter(None, (text, job)))})"
    rule = drain.row.lifted_by
    cause = drain.stuck or "; ".join(process.text for process in drain.held[:WAVE])
    if drain.passes and rule not in (Return.ADMINISTRATOR, Return.SLURM):
        cause = f"gone is {cause}" if cause else "its cause is gone"
    cause = cause or "; ".join(drain.log) or drain.row.meaning
    then = administrator_needed(drain, setting=setting, others=others)
    then = then or f"lifts itself when {_until(drain)}"
    if drain.lifted:
        then = "returned by slurm-health"
    return f"{head}: {cut(one_line(cause), _SHOWN)} \N{RIGHTWARDS ARROW} {then}"


def waves_in(drains: Iterable[SlurmDrain]) -> dict[str, tuple[str, ...]]:
    """Return the nodes in waves, with what they have in common: the breaker counts them."""
    known = tuple(drains)
    waves = {drain.node: wave(drain, known) for drain in known}
    return {node: (one.cause,) for node, one in waves.items() if one is not None}
