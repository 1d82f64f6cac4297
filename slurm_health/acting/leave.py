# SPDX-License-Identifier: Apache-2.0
"""How a job leaves its nodes: requeued elsewhere, or held until a person releases it.

Both end the process that does it, so whatever is to be known afterwards is on the job before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_health.acting.requeue_helper import Helper, Target
from slurm_health.core.acting import job_comment
from slurm_health.core.acting.decide import Disposition, Hold, RequeueElsewhere
from slurm_health.core.nodeset import fold
from slurm_health.core.records import ActionDone, ActionIntended, Record, RunFinished
from slurm_health.errors import ExitCode, SlurmCommandError, SlurmError
from slurm_health.slurm.client import Client

log = logging.getLogger(__name__)

RecordAppender = Callable[[Record], None]
_Note = Callable[[str, Sequence[str], Sequence[str], str], str]


@dataclass(frozen=True, kw_only=True)
class Acting:
    """What every act needs: the job, its run's directory, Slurm, the journal."""

    target: Target
    directory: Path
    client: Client
    append: RecordAppender
    helper: Helper


def requeue_elsewhere(action: RequeueElsewhere, acting: Acting) -> RunFinished:
    """Requeue the job without some nodes.

    Where no helper can be had, a job that has to leave waits for a person, and another stays.

    Raises:
        JournalError: an intent or a result cannot be recorded.
    """
    nodes = list(action.exclude)
    acting.append(ActionIntended(action="exclude", nodes=nodes, reason=action.reason))
    try:
        comment = job_comment.own_comment(acting.client.comment(acting.target.name))
        helper_id = acting.helper.ensure_submitted(
            acting.client, acting.target, nodes, comment, least=action.least
        )
    except SlurmError as err:
        acting.append(ActionDone(action="exclude", succeeded=False, detail=str(err)))
        if not action.needed:
            return _stayed(action, str(err))
        return hold(
            Hold(
                nodes=action.exclude,
                exit_code=ExitCode.BAD_NODES,
                reason=f"no helper job could be submitted: {_cause(err)}; {action.reason}",
            ),
            acting,
        )
    detail = f"job {helper_id}"
    acting.append(ActionDone(action="exclude", succeeded=True, nodes=nodes, detail=detail))
    _annotate(acting, nodes, action.reason, comment, job_comment.leaving)
    acting.append(ActionIntended(action="requeue", reason=action.reason))
    log.warning("requeueing job %s without %s: %s", acting.target.name, fold(nodes), action.reason)
    code = ExitCode.BAD_NODES if action.needed else ExitCode.INCONCLUSIVE
    finished = _finished(Disposition.REQUEUE, code, f"{fold(nodes)}: {action.reason}")
    acting.append(finished)
    problem = _requeue_held("requeue", comment, acting)
    if problem:
        acting.helper.withdraw(acting.client, helper_id)
        if not action.needed:
            return _stayed(action, problem)
        return _stopped(nodes, action.reason, problem, ExitCode.BAD_NODES)
    return finished


def hold(action: Hold, acting: Acting) -> RunFinished:
    """Requeue and hold the job, with a comment that says why and what to do.

    Raises:
        JournalError: an intent or a result cannot be recorded.
    """
    nodes = list(action.nodes)
    acting.append(ActionIntended(action="hold", nodes=nodes, reason=action.reason))
    comment = ""
    try:
        comment = job_comment.own_comment(acting.client.comment(acting.target.name))
    except SlurmError as err:
        log.warning("cannot read the comment of job %s: %s", acting.target.name, err)
    _annotate(acting, nodes, action.reason, comment, job_comment.waiting)
    what_to_do = f"see the comment of the job: scontrol show job {acting.target.name}"
    log.warning("holding job %s: %s; %s", acting.target.name, action.reason, what_to_do)
    finished = _finished(Disposition.HOLD, action.exit_code, f"{action.reason}; {what_to_do}")
    acting.append(finished)
    problem = _requeue_held("hold", comment, acting)
    if problem:
        return _stopped(nodes, action.reason, problem, action.exit_code)
    return finished


def _annotate(acting: Acting, nodes: Sequence[str], reason: str, comment: str, note: _Note) -> None:
    """Say on the job why it is held and what to do. It moves without that too, if need be."""
    name = acting.target.name
    try:
        text = note(name, nodes, acting.client.job(name).excluded, reason)
        acting.client.update_job(name, Comment=job_comment.with_own(text, comment))
    except SlurmError as err:
        log.warning("cannot say on job %s why it is held: %s", name, err)


def _requeue_held(action: str, comment: str, acting: Acting) -> str:
    """Requeue and hold the job; return what stood in the way, with the job as it was before."""
    try:
        acting.client.requeue_held(acting.target.name)
    except SlurmError as err:
        acting.append(ActionDone(action=action, succeeded=False, detail=str(err)))
        problem = str(err)
    else:
        return ""
    try:
        acting.client.update_job(acting.target.name, Comment=comment)
    except SlurmError as err:
        log.warning("cannot give job %s its comment back: %s", acting.target.name, err)
    return problem


def _cause(err: SlurmError) -> str:
    """Return what Slurm said, without the command line, which would fill the job's comment."""
    if not isinstance(err, SlurmCommandError):
        return str(err)
    return " / ".join(line.strip() for line in err.stderr.splitlines() if line.strip()) or str(err)


def _finished(disposition: Disposition, exit_code: ExitCode, reason: str) -> RunFinished:
    return RunFinished(disposition=disposition.value, exit_code=exit_code, reason=reason)


def _stayed(action: RequeueElsewhere, problem: str) -> RunFinished:
    nodes = fold(action.exclude)
    return _finished(
        Disposition.PROCEED,
        ExitCode.INCONCLUSIVE,
        f"{action.reason}; the job cannot leave {nodes}: {problem}; going on all the same",
    )


def _stopped(nodes: Sequence[str], reason: str, problem: str, exit_code: ExitCode) -> RunFinished:
    return _finished(
        Disposition.STOP,
        exit_code,
        f"{fold(nodes)} cannot be used: {reason}; the requeue was refused: {problem};"
        f" submit the job again with --exclude={fold(nodes)}",
    )
