# SPDX-License-Identifier: Apache-2.0
"""After a script has failed: it is started again here, on a spare, or elsewhere, or the job ends.

The supervisor starts this as a process, as it starts the check, and hears the same kind of answer.
What is done is decided in `diagnosis.failure`; here Slurm and the journal are asked
what that rests on, and it is recorded and carried out: by a check, or by acting on what is known
already.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from slurm_health.preflight.decide.policy import Policy
from slurm_health.preflight.master.check_settings import CheckSettings
from slurm_health.preflight.master.run_check import check_allocation, run_started
from slurm_health.records.allocation import Allocation
from slurm_health.records.errors import ExitCode, JournalError, SlurmError
from slurm_health.records.nodeset import fold
from slurm_health.records.records import (
    Action,
    ActionIntended,
    Disposition,
    Record,
    RunFinished,
    RunStarted,
    VerdictReached,
)
from slurm_health.records.script_records import (
    Diagnosed,
    EventKind,
    FailurePlanned,
    ScriptStarted,
    TrainingEvent,
)
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Node
from slurm_health.training.diagnosis.failure import JobAtFailure, planned, what_follows
from slurm_health.training.framework import CheckNodes, LeaveNode, RestartRanks

_PATIENCE_S = 30.0  # for a slurmctld that is being restarted
_RUNS = frozenset({"RUNNING"})


def after_failure(
    failed: FailedScript,
    allocation: Allocation,
    settings: CheckSettings,
    environ: Mapping[str, str],
    *,
    less_checked: str = "",
) -> RunFinished:
    """Decide what follows a failed script, and do it; `settings` are those of a check after it.

    `less_checked` says why that check is quick where its user asked for another, else empty.

    `settings.tell` is told how it ends, as by a check. To PROCEED is to start the script again, on
    the nodes that it says; to STOP, to end the job as the script ended.

    Raises:
        SlurmError: Slurm does not answer.
        JournalError: the journal cannot be used; nothing is done unrecorded.
    """
    if not failed.nodes:
        failed = replace(failed, nodes=allocation.nodes)
    job = allocation.array or str(allocation.job_id)
    client = Client(environ, patience_s=_PATIENCE_S)
    cause, failure = failure_of(failed, job, client, settings.policy)
    # What the script itself has given back is the job's no longer, whatever follows.
    failed = replace(failed, nodes=failure.nodes, spares=failure.spares)
    action = what_follows(cause, failure)
    journal.Writer(failed.directory, journal.RESTART, time.time).append(
        planned(action, restart=failed.restart, max_restarts=failed.max_restarts)
    )
    match action:
        case RestartRanks():
            finished = RunFinished(
                disposition=Disposition.PROCEED,
                exit_code=ExitCode.HEALTHY,
                reason=action.reason,
                nodes=list(failed.nodes),
                spares=list(failed.spares),
            )
            settings.tell(finished, failed.directory)
        case CheckNodes():
            finished = _checked(action, allocation, settings, environ, less_checked)
        case LeaveNode():
            finished = _left(failed, action, allocation, settings, environ)
        case _:
            finished = RunFinished(
                disposition=Disposition.STOP, exit_code=ExitCode.BAD_NODES, reason=action.reason
            )
            settings.tell(finished, failed.directory)
    return finished


def _checked(
    chosen: CheckNodes,
    allocation: Allocation,
    settings: CheckSettings,
    environ: Mapping[str, str],
    less_checked: str,
) -> RunFinished:
    """Check nodes, and act on the verdict and on what is known already."""
    _say(f"{chosen.reason}; checking {fold(chosen.nodes)} before the script is started again")
    if less_checked:
        _say(f"that check is quick: {less_checked}")
    tell = settings.tell

    def tell_nodes(finished: RunFinished, directory: Path) -> None:
        if not finished.nodes:  # all that were checked, which may be fewer than Slurm once gave
            finished = msgspec.structs.replace(finished, nodes=list(chosen.nodes))
        tell(finished, directory)

    return check_allocation(
        replace(allocation, nodes=chosen.nodes),
        replace(
            settings,
            at_fault=chosen.at_fault,
            policy=replace(settings.policy, last_choice=chosen.last_choice),
            run_id=secrets.token_hex(4),
            tell=tell_nodes,
        ),
        environ,
    ).finished


def _left(
    failed: FailedScript,
    chosen: LeaveNode,
    allocation: Allocation,
    settings: CheckSettings,
    environ: Mapping[str, str],
) -> RunFinished:
    """Act on what is known of nodes as on the verdict of a check, which this records as one."""
    from slurm_health.preflight.acting.perform import Acting, act  # seldom needed

    all_nodes = (*failed.nodes, *failed.spares)
    wanted = run_started(
        replace(allocation, nodes=all_nodes),
        environ,
        run_id=secrets.token_hex(4),
        script=settings.spec.script,
        submit_time_s=settings.spec.submit_time_s,
        settings={"check": "none: the failure of the script shows it"},
    )
    directory, started = journal.directory_of_check(settings.journal_root, wanted)
    journal.create(directory, [journal.MASTER, *all_nodes])
    writer = journal.Writer(directory, journal.MASTER, time.time)
    verdict = VerdictReached(nodes=list(chosen.at_fault))
    # Of the others nothing new is known: they stand as the check before the script left them.
    names = {each.node for each in chosen.at_fault}
    well = [NodeVerdict(node=n, level=Level.HEALTHY) for n in all_nodes if n not in names]

    def append(record: Record) -> None:
        writer.append(record)
        if isinstance(record, RunFinished):
            settings.tell(record, directory)

    append(started)
    append(verdict)
    judged = msgspec.structs.replace(verdict, nodes=[*verdict.nodes, *well])
    acting = Acting.as_owner(started, directory, settings.policy, environ, append)
    finished = act(judged, acting)
    if not finished.leaves:  # else it is recorded before it is done
        append(finished)
    return finished


def _say(text: str) -> None:
    print(f"slurm-health: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class FailedScript:
    """What the supervisor tells of the script that has failed.

    Args:
        directory: of the run in the journal that the script belongs to.
        restart: which restart it would be, from 1 on.
        max_restarts: how many its user allows.
        batch_node: where the supervisor runs.
        nodes: the nodes that it ran on; all that Slurm gave the job where it names none.
        spares: those that the job kept beside them.
    """

    directory: Path
    restart: int
    max_restarts: int
    batch_node: str = ""
    nodes: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()


def failure_of(
    failed: FailedScript, job: str, client: Client, policy: Policy
) -> tuple[Diagnosed | None, JobAtFailure]:
    """Return why a script failed, if a post-mortem concluded it, and the job as it is now.

    Nodes that the job no longer has are left out where nothing is against them: the script, or a
    person, gave them back.

    Raises:
        SlurmError: Slurm does not answer.
        JournalError: the journal cannot be read.
    """
    shown = client.job(job)
    all_nodes = (*failed.nodes, *failed.spares)
    gone = [node for node in all_nodes if node not in shown.nodes] if shown.nodes else []
    over = "" if shown.states <= _RUNS else "+".join(sorted(shown.states))
    least = None
    if policy.nodes_wanted is not None:
        least = policy.nodes_wanted if policy.nodes_needed is None else policy.nodes_needed
    hangs = _hangs(failed.directory)
    lost = _lost(gone, client) if gone and not over else ()
    diagnosed = _diagnosed(failed.directory)
    accused = diagnosed.accused if diagnosed else ()
    given_back = frozenset(gone) - {node for node, _ in lost} - {*accused}
    return diagnosed, JobAtFailure(
        job_over=over,
        batch_node=failed.batch_node or failed.nodes[0],
        nodes=tuple(node for node in failed.nodes if node not in given_back),
        spares=tuple(node for node in failed.spares if node not in given_back),
        lost=lost,
        restarted_unchecked=_restarted_unchecked(failed.directory),
        least=least,
        hang=hangs[-1],
        hangs_before=tuple(filter(None, hangs[:-1])),
        before=_diagnosed_before(failed.directory, diagnosed),
        here=_diagnosed_here(failed.directory, {*failed.nodes, *failed.spares} - given_back),
    )


def check_took_s(directory: Path) -> float | None:
    """Return how long the check in a run's directory took, None where it came to no verdict.

    Raises:
        JournalError: the journal cannot be read.
    """
    began_s: float | None = None
    for entry in journal.read_all(directory, journal.MASTER):  # all was written by one clock
        match entry.record:
            case RunStarted() if began_s is None:
                began_s = entry.time_s
            case VerdictReached() if began_s is not None:
                return entry.time_s - began_s
            case _:
                pass
    return None


def _lost(gone: Sequence[str], client: Client) -> tuple[tuple[str, str], ...]:
    """Return those of the nodes that a job no longer has which Slurm has lost, as it says.

    A script may give nodes back itself, and of others it is not known why they are gone.
    """
    states: Mapping[str, Node] = {}
    with contextlib.suppress(SlurmError):  # what Slurm cannot tell is not lost
        states = client.nodes(gone)
    return tuple(
        (node, f"Slurm took {node} out of the job; it is {states[node].state}")
        for node in gone
        if node in states and states[node].lost
    )


def _diagnosed(directory: Path) -> Diagnosed | None:
    """Return what the post-mortem of the last start of the script found, None without one."""
    started = [
        entry.time_s
        for entry in journal.read_all(directory, journal.SUPERVISOR)
        if isinstance(entry.record, ScriptStarted)
    ]
    found = [
        entry
        for entry in journal.read_all(directory, journal.POST_MORTEM)
        if isinstance(entry.record, Diagnosed)
    ]
    # Both were written on this node, by one clock.
    if not found or (started and found[-1].time_s < started[-1]):
        return None
    record = found[-1].record
    assert isinstance(record, Diagnosed)
    return record


def _diagnosed_before(directory: Path, latest: Diagnosed | None) -> tuple[Diagnosed, ...]:
    """Return what the post-mortems of earlier starts found, those of earlier attempts first."""
    label = directory.name.partition("-")[0]
    attempts = [directory.parent / str(n) for n in range(int(label))] if label.isdecimal() else []
    records: list[Record | None] = []
    for attempt in (*attempts, directory):
        with contextlib.suppress(JournalError):  # one that is gone, or not readable, tells nothing
            records += [entry.record for entry in journal.read_all(attempt, journal.POST_MORTEM)]
    found = [record for record in records if isinstance(record, Diagnosed)]
    return tuple(found[:-1] if latest is not None else found)


def _diagnosed_here(directory: Path, nodes: Collection[str]) -> tuple[Diagnosed, ...]:
    """Return what post-mortems found of starts in this attempt on none but these nodes.

    The last start is not among them. All was written on this node, by one clock.
    """
    writers = (journal.SUPERVISOR, journal.POST_MORTEM)
    entries = itertools.chain(*(journal.read_all(directory, writer) for writer in writers))
    found: list[Diagnosed | None] = []
    ran_on: list[str] = []
    for entry in sorted(entries, key=lambda entry: entry.time_s):
        match entry.record:
            case ScriptStarted(nodes=ran_on):
                found.append(None)
            case Diagnosed() as cause if found and set(ran_on) <= set(nodes):
                found[-1] = cause
    return tuple(filter(None, found[:-1]))


def _hangs(directory: Path) -> list[TrainingEvent | None]:
    """Return for each start of the script the hang for which it was ended; this one is the last.

    All was written on this node, by one clock.
    """
    of_writers = (
        journal.read_all(directory, each) for each in (journal.SUPERVISOR, journal.MONITOR)
    )
    entries = sorted(itertools.chain(*of_writers), key=lambda entry: entry.time_s)
    hangs: list[TrainingEvent | None] = [None]
    latest: TrainingEvent | None = None
    for entry in entries:
        match entry.record:
            case ScriptStarted(restart=restart) if restart:
                hangs.append(None)
            case TrainingEvent(event=EventKind.HANG) as latest:
                pass
            case ActionIntended(action=Action.END_SCRIPT):
                hangs[-1] = latest
    return hangs


def _restarted_unchecked(directory: Path) -> bool:
    return any(
        isinstance(entry.record, FailurePlanned) and entry.record.plan == RestartRanks.kind
        for entry in journal.read_all(directory, journal.RESTART)
    )
