# SPDX-License-Identifier: Apache-2.0
"""Carry out what was decided: record the intent, do it, record the result; requeue last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health import journal, requeue
from slurm_health.core.actions import (
    Action,
    Disposition,
    Drain,
    Finish,
    LeaveAlone,
    Policy,
    RequeueElsewhere,
    Shrink,
    Situation,
    decide,
    unwanted,
)
from slurm_health.core.nodeset import expand, fold
from slurm_health.core.records import (
    ActionDone,
    ActionIntended,
    Record,
    RunFinished,
    RunStarted,
    VerdictReached,
)
from slurm_health.errors import ExitCode, JournalError, SlurmError
from slurm_health.slurm.client import Client
from slurm_health.slurm.shown import Job

log = logging.getLogger(__name__)

RecordAppender = Callable[[Record], None]


def act(
    verdict: VerdictReached,
    *,
    started: RunStarted,
    directory: Path,
    policy: Policy,
    client: Client,
    uid: int,
    append: RecordAppender,
    helper: requeue.Helper,
) -> RunFinished:
    """Act on the verdict of the run that `started` began; return how it ends.

    When the job is requeued, this process is ended by Slurm shortly after the return.

    Raises:
        JournalError: an intent or a result cannot be recorded; nothing is done unrecorded.
    """
    if not unwanted(verdict, policy):
        # Nothing to ask Slurm about: the healthy path makes no call.
        actions = decide(verdict, policy, _nothing_known(started))
    else:
        try:
            situation = read_situation(verdict, started, directory, policy, client, uid)
        except SlurmError as err:
            reason = f"bad nodes found, but Slurm cannot be asked what to do about them: {err}"
            return _stopped(reason)
        actions = decide(verdict, policy, situation)
    return _perform(actions, started.job_id, directory, client, append, helper)


def read_situation(
    verdict: VerdictReached,
    started: RunStarted,
    directory: Path,
    policy: Policy,
    client: Client,
    uid: int,
) -> Situation:
    """Ask Slurm and the journal what the job and its owner can do.

    Raises:
        SlurmError: Slurm does not answer.
    """
    names = [node.node for node in unwanted(verdict, policy)]
    may_drain = client.may_drain(uid)
    states = client.nodes(names) if may_drain else {}
    return Situation(
        job_id=started.job_id,
        batch_node=started.master_node,
        requeues=requeues_so_far(directory.parent, exclude=directory),
        requeue_obstacle=requeue_obstacle(client.job(started.job_id), names),
        may_drain=may_drain,
        node_reasons={name: node.reason for name, node in states.items() if node.out_of_pool},
    )


def requeue_obstacle(job: Job, bad: Sequence[str]) -> str:
    """Say why a job cannot be started again without these nodes, empty if it can."""
    if job.fields.get("BatchFlag") != "1":
        return "it is not a batch job, so it cannot be requeued"
    if job.fields.get("Requeue") != "1":
        return "it may not be requeued (--no-requeue, or the cluster's JobRequeue=0)"
    asked = job.fields.get("ReqNodeList", "(null)")
    wanted = set(expand(asked)) if asked not in {"", "(null)"} else set()
    if wanted & set(bad):
        return f"it asks for {fold(wanted & set(bad))} itself (--nodelist)"
    return ""


def requeues_so_far(job_directory: Path, *, exclude: Path) -> int:
    """Count the runs of a job that ended in a requeue, from the journals of earlier attempts.

    A journal that cannot be read counts: a job that moves once too few does less harm than one
    that moves for ever.
    """
    if not job_directory.is_dir():
        return 0
    runs = [run for run in job_directory.iterdir() if run.is_dir() and run != exclude]
    return sum(map(_ended_in_requeue, runs))


def _ended_in_requeue(run: Path) -> bool:
    try:
        entries = journal.read_all(run, journal.MASTER)
    except JournalError as err:
        log.warning("%s; counted as a requeue", err)
        return True
    return any(
        isinstance(entry.record, ActionIntended) and entry.record.action == "requeue"
        for entry in entries
    )


def _perform(
    actions: Sequence[Action],
    job_id: int,
    directory: Path,
    client: Client,
    append: RecordAppender,
    helper: requeue.Helper,
) -> RunFinished:
    finished = _finish(actions) if isinstance(actions[-1], Finish) else None
    for action in actions:
        match action:
            case LeaveAlone(nodes=nodes, reason=reason):
                log.warning("%s is not drained: %s", fold(nodes), reason)
                append(
                    ActionDone(action="drain", succeeded=False, nodes=list(nodes), detail=reason)
                )
            case Drain():
                _drain(action, client, append)
            case Shrink():
                assert finished is not None
                finished = _shrink(action, finished, job_id, directory, client, append)
            case RequeueElsewhere():
                return _requeue(action, job_id, client, append, helper)
            case Finish():
                pass
    assert finished is not None
    return finished


def _shrink(
    action: Shrink,
    finished: RunFinished,
    job_id: int,
    directory: Path,
    client: Client,
    append: RecordAppender,
) -> RunFinished:
    """Give nodes back; a job that needs it and cannot have it stops, one that does not goes on."""
    nodes = list(action.drop)
    append(ActionIntended(action="drop", nodes=nodes, reason=action.reason))
    try:
        client.shrink(job_id, action.keep, directory)
        held = client.job(job_id).nodes
    except SlurmError as err:
        problem = str(err)
    else:
        problem = "" if set(held) == set(action.keep) else f"the job holds {fold(held)} afterwards"
    append(ActionDone(action="drop", succeeded=not problem, nodes=nodes, detail=problem))
    if problem and finished.exit_code == ExitCode.BAD_NODES:
        return _stopped(
            f"{action.reason}; the job cannot give {fold(nodes)} back: {problem};"
            f" submit it again with --exclude={fold(nodes)}"
        )
    if problem:
        log.warning("%s cannot be given back: %s", fold(nodes), problem)
        return finished
    reason = f"going on with {fold(action.keep)}, without {fold(nodes)}: {action.reason}"
    return msgspec.structs.replace(finished, nodes=list(action.keep), reason=reason)


def _drain(action: Drain, client: Client, append: RecordAppender) -> None:
    nodes = list(action.nodes)
    append(ActionIntended(action="drain", nodes=nodes, reason=action.reason))
    try:
        client.drain(nodes, action.reason)
        # Slurm's return codes prove nothing: look.
        after = client.nodes(nodes)
    except SlurmError as err:
        append(ActionDone(action="drain", succeeded=False, nodes=nodes, detail=str(err)))
        log.warning("%s is not drained: %s", fold(nodes), err)
        return
    drained = [name for name in nodes if name in after and after[name].out_of_pool]
    missed = sorted(set(nodes) - set(drained))
    detail = f"Slurm took it and {fold(missed)} is still in the pool" if missed else ""
    append(ActionDone(action="drain", succeeded=not missed, nodes=drained, detail=detail))
    if drained:
        log.warning("drained %s: %s", fold(drained), action.reason)
    if missed:
        log.warning("%s is not drained: %s", fold(missed), detail)


def _requeue(
    action: RequeueElsewhere,
    job_id: int,
    client: Client,
    append: RecordAppender,
    helper: requeue.Helper,
) -> RunFinished:
    nodes = list(action.exclude)
    append(ActionIntended(action="exclude", nodes=nodes, reason=action.reason))
    try:
        helper_id = helper.ensure_submitted(client, job_id, nodes)
    except SlurmError as err:
        append(ActionDone(action="exclude", succeeded=False, detail=str(err)))
        return _stopped(
            f"{fold(nodes)} cannot be used: {action.reason}; the job cannot be moved away: {err};"
            f" submit it again with --exclude={fold(nodes)}"
        )
    append(ActionDone(action="exclude", succeeded=True, nodes=nodes, detail=f"job {helper_id}"))
    append(ActionIntended(action="requeue", reason=action.reason))
    finished = RunFinished(
        disposition=Disposition.REQUEUE.value,
        exit_code=ExitCode.BAD_NODES,
        reason=f"{fold(nodes)}: {action.reason}",
    )
    append(finished)
    log.warning("requeueing job %d without %s: %s", job_id, fold(nodes), action.reason)
    try:
        client.requeue_held(job_id)
    except SlurmError as err:
        append(ActionDone(action="requeue", succeeded=False, detail=str(err)))
        helper.withdraw(client, helper_id)
        return _stopped(
            f"{fold(nodes)} cannot be used: {action.reason}; the requeue was refused: {err};"
            f" submit the job again with --exclude={fold(nodes)}"
        )
    return finished


def _finish(actions: Sequence[Action]) -> RunFinished:
    last = actions[-1]
    assert isinstance(last, Finish)
    return RunFinished(
        disposition=last.disposition.value, exit_code=last.exit_code, reason=last.reason
    )


def _stopped(reason: str) -> RunFinished:
    return RunFinished(
        disposition=Disposition.STOP.value, exit_code=ExitCode.BAD_NODES, reason=reason
    )


def _nothing_known(started: RunStarted) -> Situation:
    node_reasons: Mapping[str, str] = {}
    return Situation(
        job_id=started.job_id,
        batch_node=started.master_node,
        requeues=0,
        requeue_obstacle="",
        may_drain=False,
        node_reasons=node_reasons,
    )
