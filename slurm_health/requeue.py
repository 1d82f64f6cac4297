# SPDX-License-Identifier: Apache-2.0
"""Start a job again on other nodes within seconds, with no rights but its owner's.

A running job cannot exclude nodes from its own next attempt: Slurm takes that change only while
the job is pending, and the job's processes are dead by then. A plain requeue would start it
again two minutes later, perhaps on the same node. So before it requeues and holds itself, the
job submits a small helper job, which waits until the first one is pending, gives it the nodes to
exclude and a start time of now, reads back that this took effect, and releases it.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_health import journal
from slurm_health.core.nodeset import fold
from slurm_health.core.records import ActionDone
from slurm_health.errors import JournalError, SlurmError
from slurm_health.slurm.client import Client
from slurm_health.slurm.command import clean_environ
from slurm_health.slurm.shown import Job

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


def helper_name(job_id: int) -> str:
    """Return the name of the helper job of a job."""
    return f"slurm-health-requeue-{job_id}"


@dataclass(frozen=True, kw_only=True)
class Helper:
    """How to submit the helper job.

    `command` runs `release_elsewhere` in it; `directory` is the run's, for its log.
    """

    command: tuple[str, ...]
    directory: Path
    environ: Mapping[str, str]
    uid: int

    def ensure_submitted(self, client: Client, job_id: int, exclude: Sequence[str]) -> int:
        """Submit the helper of a job, or find the one an interrupted master submitted.

        Raises:
            SlurmError: it was refused, or Slurm does not answer.
        """
        present = client.jobs_named(helper_name(job_id), self.uid)
        if present:
            return present[0]
        arguments = helper_arguments(client.job(job_id), exclude, self.directory)
        command = [*self.command, "--exclude", fold(exclude)]
        script = f"#!/bin/sh\nexec {shlex.join(command)}\n"
        return client.submit(arguments, script, clean_environ(self.environ))

    def withdraw(self, client: Client, helper_id: int) -> None:
        """Cancel the helper after all. One that cannot be cancelled gives up by itself."""
        try:
            client.cancel(helper_id)
        except SlurmError as err:
            log.warning("cannot cancel helper job %d: %s", helper_id, err)


def helper_arguments(job: Job, exclude: Sequence[str], directory: Path) -> list[str]:
    """Return sbatch's options for the helper: one small task, beside the job, not on a bad node."""
    arguments = [
        f"--job-name={helper_name(job.job_id)}",
        "--nodes=1",
        "--ntasks=1",
        f"--mem={HELPER_MEMORY_MB}M",
        f"--time={HELPER_MINUTES}",
        "--no-requeue",
        f"--exclude={fold(exclude)}",
        f"--chdir={directory}",
        f"--output={directory / 'requeue.log'}",
    ]
    for option, key in (("partition", "Partition"), ("account", "Account"), ("qos", "QOS")):
        value = job.fields.get(key, "(null)")
        if value not in {"", "(null)", "N/A"}:
            arguments.append(f"--{option}={value}")
    return arguments


def release_elsewhere(
    job_id: int,
    exclude: Sequence[str],
    *,
    directory: Path,
    client: Client,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Run in the helper job: let the job go, but not to the excluded nodes.

    The job is released only after Slurm has been seen to have taken the list. When that cannot
    be had the job stays held, with a comment that says so.
    """
    if not _wait_until_pending(job_id, client, clock, sleep):
        _record(directory, clock, succeeded=False, detail="the job ended or was never requeued")
        return False
    sleep(REVOKED_S)
    problem = ""
    for _ in range(TRIES):
        try:
            problem = _release_once(job_id, exclude, client)
        except SlurmError as err:
            problem = str(err)
        if not problem:
            _record(directory, clock, succeeded=True, detail=f"without {fold(exclude)}")
            return True
        sleep(SLOW_POLL_S)
    _explain_hold(job_id, exclude, client, problem)
    _record(directory, clock, succeeded=False, detail=f"left held: {problem}")
    return False


def _wait_until_pending(
    job_id: int, client: Client, clock: Callable[[], float], sleep: Callable[[float], None]
) -> bool:
    give_up_s = clock() + PENDING_S
    polls = 0
    while clock() < give_up_s:
        try:
            job = client.job(job_id)
        except SlurmError as err:
            log.warning("cannot read job %d yet: %s", job_id, err)
        else:
            if job.pending:
                return True
            if job.states & _ENDED and "COMPLETING" not in job.states:
                return False
        polls += 1
        sleep(POLL_S if polls < QUICK_POLLS else SLOW_POLL_S)
    return False


def _release_once(job_id: int, exclude: Sequence[str], client: Client) -> str:
    """Try once; return what stands in the way, empty when the job is released."""
    job = client.job(job_id)
    if not job.pending:
        return "" if _runs_elsewhere(job) else f"the job is {'+'.join(sorted(job.states))}"
    wanted = sorted({*job.excluded, *exclude})
    client.update_job(job_id, ExcNodeList=fold(wanted))
    if not set(wanted) <= set(client.job(job_id).excluded):
        return "Slurm did not keep the list of nodes to exclude"
    client.update_job(job_id, StartTime="now")
    client.release(job_id)
    after = client.job(job_id)
    if after.held:
        return f"the job is still held ({after.reason})"
    return ""


def _runs_elsewhere(job: Job) -> bool:
    return "RUNNING" in job.states


def _explain_hold(job_id: int, exclude: Sequence[str], client: Client, problem: str) -> None:
    hint = (
        f"held by slurm-health: {problem}. Release it without the bad nodes: scontrol update"
        f" JobId={job_id} ExcNodeList={fold(exclude)} StartTime=now; scontrol release {job_id}"
    )
    try:
        client.update_job(job_id, Comment=hint)
    except SlurmError as err:
        log.warning("cannot say on job %d why it is held: %s", job_id, err)


def _record(directory: Path, clock: Callable[[], float], *, succeeded: bool, detail: str) -> None:
    log.info("%s: %s", "released" if succeeded else "not released", detail)
    try:
        writer = journal.Writer(directory, journal.REQUEUE, clock)
        writer.append(ActionDone(action="requeue", succeeded=succeeded, detail=detail))
    except JournalError as err:
        log.warning("%s", err)
