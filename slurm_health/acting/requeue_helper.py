# SPDX-License-Identifier: Apache-2.0
"""Start a job again on other nodes within seconds, with no rights but its owner's.

A running job cannot exclude nodes from its own next attempt: Slurm takes that change only while
the job is pending, and the job's processes are dead by then. A plain requeue would start it
again two minutes later, perhaps on the same node. So before it requeues and holds itself, the
job submits a small helper job, which waits until the first one is pending, gives it the nodes to
exclude and a start time of now, reads back that this took effect, and releases it.

Whatever becomes of the helper, the job then carries a comment that says how to release it by hand;
the helper takes that away at its end.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_health import journal
from slurm_health.acting import fewer_nodes
from slurm_health.core.acting import job_comment
from slurm_health.core.nodeset import fold
from slurm_health.core.records import ActionDone, RunStarted
from slurm_health.errors import JournalError, SlurmError, UnknownJob
from slurm_health.slurm.client import Client
from slurm_health.slurm.command import clean_environ
from slurm_health.slurm.parsing import Job

log = logging.getLogger(__name__)

HELPER_MINUTES = 10
HELPER_MEMORY_MB = 100
# How long the helper waits for the job to be pending: Slurm allows processes KillWait (30 s by
# default) to end, and epilogs may follow.
PENDING_S = 300.0
POLL_S = 0.1
SLOW_POLL_S = 1.0
# Slurm revokes a job's credentials when an attempt ends, to the whole second: an attempt that
# begins within that second is killed ("Job credential revoked") and the job fails. Held for
# longer than a second after it is seen pending, a job begins in a later one, whatever the clocks.
REVOKED_S = 1.1
QUICK_POLLS = 100
TRIES = 20
# What the helper shares with the job, as sbatch and scontrol call it: elsewhere it may not start.
_LIKE_THE_JOB = (
    ("partition", "Partition"),
    ("account", "Account"),
    ("qos", "QOS"),
    ("reservation", "Reservation"),
)
_ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)


def helper_name(job_id: int, attempt: int) -> str:
    """Return the name of the helper job of one attempt of a job."""
    return f"slurm-health-requeue-{job_id}-{attempt}"


class NotNeeded(Exception):
    """There is nothing left to do for the job; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One attempt of a job. `name` is how Slurm's commands call it: `12`, or `12_3` in an array."""

    job_id: int
    name: str
    attempt: int

    @classmethod
    def of(cls, started: RunStarted) -> Target:
        """Return the attempt that a check was started in.

        A task of an array is never called by its number alone.
        """
        name = started.array or str(started.job_id)
        return cls(job_id=started.job_id, name=name, attempt=started.attempt)


@dataclass(frozen=True, kw_only=True)
class Helper:
    """How to submit the helper job of a run.

    `command` runs slurm-health in it; `directory` is the run's, for its log.
    """

    command: tuple[str, ...]
    directory: Path
    environ: Mapping[str, str]
    uid: int

    def ensure_submitted(
        self,
        client: Client,
        target: Target,
        exclude: Sequence[str],
        comment: str,
        *,
        least: int | None = None,
    ) -> int:
        """Submit the helper of a job, or find the one an interrupted master submitted.

        Args:
            client: Slurm's commands.
            target: the job.
            exclude: nodes that it must not come back to.
            comment: the job's own, which it gets back in the end.
            least: with how few nodes it makes do, None if it needs all that it asks for.

        Raises:
            SlurmError: it was refused, or Slurm does not answer.
        """
        name = helper_name(target.job_id, target.attempt)
        present = client.jobs_named(name, self.uid)
        if present:
            return present[0]
        arguments = helper_arguments(client.job(target.name), name, exclude, self.directory)
        command = [
            *self.command,
            f"--job-id={target.job_id}",
            f"--name={target.name}",
            f"--attempt={target.attempt}",
            f"--directory={self.directory}",
            f"--exclude={fold(exclude)}",
            f"--comment={comment}",
        ]
        if least is not None:
            command.append(f"--least={least}")
        script = f"#!/bin/sh\nexec {shlex.join(command)}\n"
        return client.submit(arguments, script, clean_environ(self.environ))

    def withdraw(self, client: Client, helper_id: int) -> None:
        """Cancel the helper after all. One that cannot be cancelled gives up by itself."""
        try:
            client.cancel(helper_id)
        except SlurmError as err:
            log.warning("cannot cancel helper job %d: %s", helper_id, err)


def helper_arguments(job: Job, name: str, exclude: Sequence[str], directory: Path) -> list[str]:
    """Return sbatch's options for the helper: one small task, beside the job, not on a bad node."""
    arguments = [
        f"--job-name={name}",
        "--nodes=1",
        "--ntasks=1",
        f"--mem={HELPER_MEMORY_MB}M",
        f"--time={HELPER_MINUTES}",
        "--no-requeue",
        f"--exclude={fold(exclude)}",
        f"--chdir={directory}",
        f"--output={directory / 'requeue.log'}",
    ]
    for option, key in _LIKE_THE_JOB:
        value = job.fields.get(key, "(null)")
        if value not in {"", "(null)", "N/A"}:
            arguments.append(f"--{option}={value}")
    return arguments


def release_elsewhere(
    target: Target,
    exclude: Sequence[str],
    comment: str,
    *,
    least: int | None = None,
    directory: Path,
    client: Client,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Run in the helper job: let the job go, but not to the excluded nodes.

    The job is released only after Slurm has been seen to have taken the list, and only if it is
    still waiting for that: not when it has ended, or was released and requeued by others since.
    `comment` is the job's own. A job that cannot be released stays held, and its comment says why.
    One that makes do with `least` nodes asks for no more than there are.
    """
    try:
        _await_pending(target, client, clock, sleep)
        sleep(REVOKED_S)
        smaller = _ask_for_fewer(target, least, exclude, client)
        problem = _release(target, exclude, client, sleep)
    except NotNeeded as reason:
        _record(directory, clock, succeeded=False, detail=str(reason))
        return False
    if problem:
        _comment(target, client, _explained(target, exclude, client, problem, comment))
        _record(directory, clock, succeeded=False, detail=f"left held: {problem}")
        return False
    _comment(target, client, comment)
    detail = ", ".join([f"without {fold(exclude)}", *smaller])
    _record(directory, clock, succeeded=True, detail=detail)
    return True


def _await_pending(
    target: Target,
    client: Client,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Wait until the attempt is over and the job in the queue, or beyond.

    Raises:
        NotNeeded: that will not come.
    """
    give_up_s = clock() + PENDING_S
    polls = 0
    while clock() < give_up_s:
        try:
            job = _waiting(target, client)
        except SlurmError as err:
            log.warning("cannot read job %s yet: %s", target.name, err)
        else:
            if job.pending or _runs_again(job, target):
                return
        polls += 1
        sleep(POLL_S if polls < QUICK_POLLS else SLOW_POLL_S)
    raise NotNeeded(f"the job was not requeued within {PENDING_S:.0f} s")


def _runs_again(job: Job, target: Target) -> bool:
    return "RUNNING" in job.states and job.restarts > target.attempt


def _waiting(target: Target, client: Client) -> Job:
    """Read the job.

    Raises:
        NotNeeded: it has ended, or this attempt of it lies behind the next one.
        SlurmError: Slurm does not answer.
    """
    try:
        job = client.job(target.name)
    except UnknownJob:
        raise NotNeeded("Slurm has forgotten the job, so it has ended") from None
    if job.states & _ENDED and "COMPLETING" not in job.states:
        raise NotNeeded(f"the job has ended ({'+'.join(sorted(job.states))})")
    if job.restarts > target.attempt + 1:
        raise NotNeeded("the job was requeued again since, by itself or by others")
    return job


def _ask_for_fewer(
    target: Target, least: int | None, exclude: Sequence[str], client: Client
) -> list[str]:
    """Fit a job to the nodes there are; return what is to be said of it.

    A job that cannot be made smaller is released as it is: it waits, as it would have.
    """
    if least is None:
        return []
    try:
        job = _waiting(target, client)
        if not job.pending:
            return []
        excluded = {*job.excluded, *exclude}
        count = fewer_nodes.ask_for_what_there_is(target.name, least, excluded, client)
    except SlurmError as err:
        log.warning("job %s cannot ask for fewer nodes: %s", target.name, err)
        return ["it cannot ask for fewer nodes"]
    return [f"of size {count}, as no more nodes are left"] if count else []


def _release(
    target: Target,
    exclude: Sequence[str],
    client: Client,
    sleep: Callable[[float], None],
) -> str:
    """Release the job; return what stands in the way after many tries, empty once it is released.

    Raises:
        NotNeeded: it needs no release any more.
    """
    problem = ""
    for _ in range(TRIES):
        try:
            problem = _release_once(target, exclude, client)
        except SlurmError as err:
            problem = str(err)
        if not problem:
            return ""
        sleep(SLOW_POLL_S)
    return problem


def _release_once(target: Target, exclude: Sequence[str], client: Client) -> str:
    job = _waiting(target, client)
    if "RUNNING" in job.states:
        if set(job.nodes) & set(exclude):
            raise NotNeeded(f"somebody else has released the job, and it runs on {fold(job.nodes)}")
        return ""  # an earlier try took effect although it was answered by an error
    if not job.pending:
        return f"the job is {'+'.join(sorted(job.states))}"
    wanted = sorted({*job.excluded, *exclude})
    client.update_job(target.name, ExcNodeList=fold(wanted))
    if not set(wanted) <= set(client.job(target.name).excluded):
        return "Slurm did not keep the list of nodes to exclude"
    client.update_job(target.name, StartTime="now")
    client.release(target.name)
    after = client.job(target.name)
    if after.held:
        return f"the job is still held ({after.reason})"
    return ""


def _explained(
    target: Target, exclude: Sequence[str], client: Client, problem: str, own: str
) -> str:
    """Return the comment for a job that stays held."""
    excluded: tuple[str, ...] = ()
    with contextlib.suppress(SlurmError):
        excluded = client.job(target.name).excluded
    note = job_comment.leaving(
        target.name, exclude, excluded, f"it could not be released: {problem}"
    )
    return job_comment.with_own(note, own)


def _comment(target: Target, client: Client, text: str) -> None:
    try:
        client.update_job(target.name, Comment=text)
    except SlurmError as err:
        log.warning("cannot set the comment of job %s to %r: %s", target.name, text, err)


def _record(directory: Path, clock: Callable[[], float], *, succeeded: bool, detail: str) -> None:
    log.info("%s: %s", "released" if succeeded else "not released", detail)
    try:
        writer = journal.Writer(directory, journal.REQUEUE, clock)
        writer.append(ActionDone(action="requeue", succeeded=succeeded, detail=detail))
    except JournalError as err:
        log.warning("%s", err)
