# SPDX-License-Identifier: Apache-2.0
"""Carry out what was decided: record the intent, do it, record the result; requeue last."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from slurm_health.acting.job_facts import read_situation
from slurm_health.acting.leave import Acting, RecordAppender, hold, requeue_elsewhere
from slurm_health.acting.requeue_helper import Helper, Target
from slurm_health.core.acting.decide import (
    Action,
    Disposition,
    Finish,
    Hold,
    Policy,
    RequeueElsewhere,
    Shrink,
    Situation,
    decide,
    decide_unasked,
    unwanted,
)
from slurm_health.core.acting.drains import Drain, LeaveAlone
from slurm_health.core.nodeset import fold
from slurm_health.core.records import (
    ActionDone,
    ActionIntended,
    RunFinished,
    RunStarted,
    VerdictReached,
)
from slurm_health.errors import ExitCode, SlurmError
from slurm_health.slurm.client import Client

log = logging.getLogger(__name__)


def act(
    verdict: VerdictReached,
    *,
    started: RunStarted,
    directory: Path,
    policy: Policy,
    client: Client,
    uid: int,
    append: RecordAppender,
    helper: Helper,
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
            return _finished(decide_unasked(verdict, policy, str(err)))
        actions = decide(verdict, policy, situation)
    acting = Acting(
        target=Target.of(started),
        directory=directory,
        client=client,
        append=append,
        helper=helper,
    )
    finished = _perform(actions, acting)
    smaller = policy.nodes_wanted is not None and len(verdict.nodes) < policy.nodes_wanted
    if finished.disposition == Disposition.PROCEED.value and smaller and not finished.nodes:
        # Slurm 22.05 gives a job that was made smaller while it waited its earlier task count.
        names = [node.node for node in verdict.nodes]
        finished = msgspec.structs.replace(finished, nodes=names)
    return finished


def _perform(actions: Sequence[Action], acting: Acting) -> RunFinished:
    last = actions[-1]
    finished = _finished(last) if isinstance(last, Finish) else None
    for action in actions:
        match action:
            case LeaveAlone(nodes=nodes, reason=reason):
                log.warning("%s is not drained: %s", fold(nodes), reason)
                acting.append(
                    ActionDone(action="drain", succeeded=False, nodes=list(nodes), detail=reason)
                )
            case Drain():
                _drain(action, acting)
            case Shrink():
                assert finished is not None
                finished = _shrink(action, finished, acting)
            case RequeueElsewhere():
                return requeue_elsewhere(action, acting)
            case Hold():
                return hold(action, acting)
            case Finish():
                pass
    assert finished is not None
    return finished


def _shrink(action: Shrink, finished: RunFinished, acting: Acting) -> RunFinished:
    """Give nodes back; a job that needs it and cannot have it stops, one that does not goes on."""
    nodes = list(action.drop)
    acting.append(ActionIntended(action="drop", nodes=nodes, reason=action.reason))
    problem = _given_back(action, acting)
    acting.append(ActionDone(action="drop", succeeded=not problem, nodes=nodes, detail=problem))
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


def _given_back(action: Shrink, acting: Acting) -> str:
    """Give nodes back; return what stood in the way, empty if the job holds what it is to keep."""
    refusal = ""
    try:
        acting.client.shrink(acting.target.name, action.keep, acting.directory)
    except SlurmError as err:
        refusal = str(err)
    try:
        # Asked whatever the answer was: Slurm 24.11 drops the nodes of a job with --ntasks-per-gpu,
        # and answers that it cannot.
        held = acting.client.job(acting.target.name).nodes
    except SlurmError as err:
        return refusal or str(err)
    if set(held) == set(action.keep):
        return ""
    return refusal or f"the job holds {fold(held)} afterwards"


def _drain(action: Drain, acting: Acting) -> None:
    nodes = list(action.nodes)
    append, client = acting.append, acting.client
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


def _finished(last: Finish) -> RunFinished:
    return RunFinished(
        disposition=last.disposition.value, exit_code=last.exit_code, reason=last.reason
    )


def _stopped(reason: str) -> RunFinished:
    return RunFinished(
        disposition=Disposition.STOP.value, exit_code=ExitCode.BAD_NODES, reason=reason
    )


def _nothing_known(started: RunStarted) -> Situation:
    return Situation(
        job_id=started.job_id,
        batch_node=started.master_node,
        requeues=0,
        requeue_obstacle="",
        may_drain=False,
        node_reasons={},
    )
