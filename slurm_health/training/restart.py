# SPDX-License-Identifier: Apache-2.0
"""After a script has failed: it starts again here, on a spare, or elsewhere, or the job ends.

The supervisor starts this as a process, like the check, and receives the same answer.
`diagnosis.failure` decides; here Slurm and the journal are read for that, and the action is
recorded and carried out: by a check, or by acting on known verdicts.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
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
    JobOutcome,
    Record,
    RunStarted,
    VerdictReached,
)
from slurm_health.records.script_records import (
    Diagnosed,
    EventKind,
    FailurePlanned,
    ProgressSeen,
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
_WRITERS = (journal.SUPERVISOR, journal.MONITOR, journal.POST_MORTEM, journal.RESTART)


def after_failure(
    failed: FailedScript,
    allocation: Allocation,
    settings: CheckSettings,
    environ: Mapping[str, str],
    *,
    less_checked: str = "",
) -> JobOutcome:
    """Decide on the action after a failed script, and do it; `settings` are those of a check.

    `less_checked` is why that check is quick although its user asked for another, else empty.

    `settings.tell` receives the outcome, as of a check. PROCEED starts the script again, on the
    nodes of the outcome; STOP ends the job with the script's exit status.

    Raises:
        SlurmError: Slurm does not answer.
        JournalError: the journal cannot be used; nothing is done unrecorded.
    """
    if not failed.nodes:
        failed = replace(failed, nodes=allocation.nodes)
    job = allocation.array or str(allocation.job_id)
    client = Client(environ, patience_s=_PATIENCE_S)
    cause, failure = failure_of(failed, job, client, settings.policy)
    # Nodes that the script itself has given back are no longer the job's.
    failed = replace(failed, nodes=failure.nodes, spares=failure.spares)
    action = what_follows(cause, failure)
    journal.Writer(failed.directory, journal.RESTART, time.time).append(
        planned(action, restart=failed.restart, max_restarts=failed.max_restarts)
    )
    match action:
        case RestartRanks():
            finished = JobOutcome(
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
            finished = JobOutcome(
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
) -> JobOutcome:
    """Check nodes, and act on the verdict and on earlier ones."""
    _say(f"{chosen.reason}; checking {fold(chosen.nodes)} before the script is started again")
    if less_checked:
        _say(f"that check is quick: {less_checked}")
    tell = settings.tell

    def tell_nodes(finished: JobOutcome, directory: Path) -> None:
        if not finished.nodes:  # all checked nodes, which may be fewer than Slurm once gave
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
) -> JobOutcome:
    """Act on the nodes at fault as on the verdict of a check, and record it as one."""
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
    # The other nodes keep the verdict of the check before the script.
    names = {verdict.node for verdict in chosen.at_fault}
    well = [NodeVerdict(node=n, level=Level.HEALTHY) for n in all_nodes if n not in names]

    def append(record: Record) -> None:
        writer.append(record)
        if isinstance(record, JobOutcome):
            settings.tell(record, directory)

    append(started)
    append(verdict)
    judged = msgspec.structs.replace(verdict, nodes=[*verdict.nodes, *well])
    acting = Acting(
        started=started,
        directory=directory,
        policy=settings.policy,
        environ=environ,
        append=append,
    )
    finished = act(judged, acting)
    if not finished.leaves:  # else it is recorded before it is done
        append(finished)
    return finished


def _say(text: str) -> None:
    print(f"slurm-health: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class FailedScript:
    """The script that has failed, by its supervisor.

    Args:
        directory: of the script's run in the journal.
        restart: the number of its next restart, from 1 on.
        max_restarts: their limit, by its user.
        batch_node: the supervisor's node.
        nodes: the script's nodes; empty for all that Slurm gave the job.
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
    """Return why a script failed, by its post-mortem if there is one, and the job as it is now.

    Nodes that the job no longer has are left out unless they are at fault: the script, or a
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
    lost = _lost(gone, client) if gone and not over else ()
    *earlier, last = _starts(failed.directory)
    accused = last.cause.accused if last.cause else ()
    given_back = frozenset(gone) - {node for node, _ in lost} - {*accused}
    here = [start for start in earlier if start.attempt == last.attempt]
    since = max((n for n, start in enumerate(earlier, start=1) if start.left), default=0)
    return last.cause, JobAtFailure(
        job_over=over,
        batch_node=failed.batch_node or failed.nodes[0],
        nodes=tuple(node for node in failed.nodes if node not in given_back),
        spares=tuple(node for node in failed.spares if node not in given_back),
        lost=lost,
        restarted_unchecked=any(start.plan == RestartRanks.kind for start in here),
        least=least,
        hang=last.hang,
        hangs_before=tuple(start.hang for start in here if start.hang),
        before=tuple(start.cause for start in earlier if start.cause),
        checked=tuple(
            start.cause
            for start in earlier[since:]
            if start.cause and start.plan == CheckNodes.kind
        ),
        steps=tuple(start.step for start in (*earlier, last)),
        saved=tuple(start.saved for start in (*earlier, last)),
    )


@dataclass(kw_only=True)
class _Start:
    """One start of the script in this or an earlier attempt of the job.

    Attributes:
        attempt: the directory of the attempt.
        nodes: its nodes; empty for all of the job's.
        cause: why it failed, by its post-mortem.
        hang: the hang for which it was ended.
        plan: the action after its failure.
        left: the job went on without one of its nodes after that.
        step: the last one that the monitor recorded.
        saved: the last line that names a checkpoint, by the monitor.
    """

    attempt: Path
    nodes: frozenset[str] = frozenset()
    cause: Diagnosed | None = None
    hang: TrainingEvent | None = None
    plan: str = ""
    left: bool = False
    step: int = 0
    saved: str = ""


def _starts(directory: Path) -> list[_Start]:
    """Return all starts of a job's script, the last one last, and how they ended.

    The journal of an attempt was written on one node, by one clock.

    Raises:
        JournalError: that of this attempt cannot be read; earlier ones may be gone.
    """
    label = directory.name.partition("-")[0]
    attempts = [directory.parent / str(n) for n in range(int(label))] if label.isdecimal() else []
    starts: list[_Start] = []
    for attempt in (*attempts, directory):
        try:
            entries = [entry for writer in _WRITERS for entry in journal.read_all(attempt, writer)]
        except JournalError:
            if attempt == directory:
                raise
            continue
        if starts and starts[-1].plan in (CheckNodes.kind, LeaveNode.kind):
            starts[-1].left = True  # after a check without a fault it had started there again
        starts.append(_Start(attempt=attempt))
        began = False
        hang: TrainingEvent | None = None
        for entry in sorted(entries, key=lambda entry: entry.time_s):
            match entry.record:
                case ScriptStarted(nodes=nodes):
                    before, now = starts[-1], frozenset(nodes)
                    if began:
                        before.left = bool(now) and not (before.nodes and before.nodes <= now)
                        starts.append(_Start(attempt=attempt))
                    starts[-1].nodes = now
                    began = True
                case TrainingEvent(event=EventKind.HANG) as hang:
                    pass
                case ProgressSeen(step=step, saved=saved):
                    starts[-1].step = max(step, starts[-1].step)
                    starts[-1].saved = saved or starts[-1].saved
                case ActionIntended(action=Action.END_SCRIPT):
                    starts[-1].hang = hang
                case Diagnosed() as cause:
                    starts[-1].cause = cause
                case FailurePlanned(plan=plan):
                    starts[-1].plan = plan
    return starts


def check_took_s(directory: Path) -> float | None:
    """Return how long the check in a run's directory took, None without a verdict.

    Raises:
        JournalError: the journal cannot be read.
    """
    began_s: float | None = None
    for entry in journal.read_all(directory, journal.MASTER):  # one clock wrote all of it
        match entry.record:
            case RunStarted() if began_s is None:
                began_s = entry.time_s
            case VerdictReached() if began_s is not None:
                return entry.time_s - began_s
            case _:
                pass
    return None


def _lost(gone: Sequence[str], client: Client) -> tuple[tuple[str, str], ...]:
    """Return the nodes that Slurm has lost, of those that a job no longer has, with its words.

    A script may give nodes back itself, or they are gone for an unknown reason.
    """
    states: Mapping[str, Node] = {}
    with contextlib.suppress(SlurmError):  # unknown states mean no loss
        states = client.nodes(gone)
    return tuple(
        (node, f"Slurm took {node} out of the job; it is {states[node].state}")
        for node in gone
        if node in states and states[node].lost
    )
