# SPDX-License-Identifier: Apache-2.0
"""Let a requeued job go, but not to its bad nodes. Runs in the helper job, after the first attempt.

A running job cannot exclude nodes from its own next attempt: Slurm takes that change only while
the job is pending, and the job's processes are dead by then. A plain requeue would start it
again two minutes later, perhaps on the same node. So before it requeues and holds itself, the
job submits a small helper job, with no rights but its owner's.

It waits until the job is pending, gives it the nodes to exclude and a start time of now, reads back
that this took effect, and releases it. Whatever becomes of the helper, the job carries a comment
that says how to release it by hand; the helper takes that away at its end.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slurm_health.preflight.decide.facts import leaving_note, with_own_comment
from slurm_health.records.errors import JournalError, SlurmError, UnknownJob
from slurm_health.records.nodeset import fold
from slurm_health.records.records import Action, ActionDone
from slurm_health.records.text import whole_number
from slurm_health.system import journal, owner
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Job

log = logging.getLogger(__name__)

# How long the helper waits for the job to be pending: Slurm allows processes KillWait (30 s by
# default) to end, epilogs follow, and a node that does not answer is given up after SlurmdTimeout
# (300 s by default).
PENDING_S = 600.0
POLL_S = 0.1
SLOW_POLL_S = 1.0
# Slurm revokes a job's credentials when an attempt ends, to the whole second: an attempt that
# begins within that second is killed ("Job credential revoked") and the job fails. Held for
# longer than a second after it is seen pending, a job begins in a later one, whatever the clocks.
REVOKED_S = 1.1
# Two seconds is how long a node may not forget the ended attempt (Client.forgets_late).
FORGETS_S = 2.1
QUICK_POLLS = 100
TRIES = 20
_TELL_S = 20.0  # for a message to the owner; the release takes a second or more beside it


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """The task of the helper job.

    Args:
        job: the job, as Slurm's commands call it: `12`, or `12_3` in an array.
        attempt: the attempt of the job that ends.
        exclude: nodes that it must not come back to.
        comment: the job's own, which it gets back in the end.
        least: on how few nodes it runs; None: on all that it asks for.
        leave: the nodes that it leaves now, for `reason`: its owner may want to know.
    """

    job: str
    attempt: int
    exclude: tuple[str, ...]
    comment: str = ""
    least: int | None = None
    leave: tuple[str, ...] = ()
    reason: str = ""


def helper_name(job_id: int, attempt: int) -> str:
    """Return the name of the helper job of one attempt of a job."""
    return f"slurm-health-requeue-{job_id}-{attempt}"


class NotNeeded(Exception):
    """There is nothing left to do for the job; the message says why."""


def release_elsewhere(
    move: Move,
    *,
    directory: Path,
    client: Client,
    here: str = "",
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Release the job without the nodes it leaves; tell whether it was.

    The job is released only after Slurm has been seen to have taken the list, and only if it is
    still waiting for that: not when it has ended, or was released and requeued by others since. A
    job that cannot be released stays held, and its comment says why. `here` is the node on which
    this runs, which is free for the job as soon as this has ended.
    """
    release = _Release(move=move, client=client, here=here, clock=clock, sleep=sleep)
    try:
        release.await_pending()
        sleep(release.pause_s())
        problem = release.try_to_release()
    except NotNeeded as reason:
        _record(directory, clock, succeeded=False, detail=str(reason))
        return False
    if problem:
        release.explain(problem)
        _record(directory, clock, succeeded=False, detail=f"left held: {problem}")
        return False
    release.comment(move.comment)
    _record(directory, clock, succeeded=True, detail=f"without {fold(move.exclude)}")
    return True


@contextlib.contextmanager
def telling_owner(move: Move, environ: Mapping[str, str]) -> Iterator[None]:
    """Send the job's owner that it moves, while active and at most a little longer.

    Not before the requeue: that would wait for it. `environ` is that of this helper job.
    """
    array, _, task = move.job.partition("_")
    of_job = {**environ, "SLURM_JOB_ID": array, "SLURM_JOB_NAME": ""}
    of_job |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task} if task else {}
    message = ("moved", f"moves away from {fold(move.leave)}", move.reason, of_job)
    thread = threading.Thread(target=owner.tell, args=message, kwargs={"wait_s": _TELL_S})
    thread.start()
    try:
        yield
    finally:
        thread.join()


@dataclass(frozen=True, kw_only=True)
class _Release:
    """The steps of one release. Each reads the job anew: others may act on it too."""

    move: Move
    client: Client
    here: str
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def await_pending(self) -> None:
        """Wait until the attempt is over and the job in the queue, or beyond.

        Raises:
            NotNeeded: that will not come.
        """
        give_up_s = self.clock() + PENDING_S
        polls = 0
        while self.clock() < give_up_s:
            try:
                job = self._waiting()
            except SlurmError as err:
                log.warning("could not read job %s yet: %s", self.move.job, err)
            else:
                if job.pending or ("RUNNING" in job.states and job.restarts > self.move.attempt):
                    return
            polls += 1
            self.sleep(POLL_S if polls < QUICK_POLLS else SLOW_POLL_S)
        raise NotNeeded(f"the job was not requeued within {PENDING_S:.0f} s")

    def pause_s(self) -> float:
        """Return how long the job stays held once it is pending, lest its next attempt fails."""
        try:
            return FORGETS_S if self.client.forgets_late() else REVOKED_S
        except SlurmError:
            return FORGETS_S

    def _fit_to_nodes(self, job: Job) -> None:
        """Let a job ask for no more nodes than are free, and no more tasks than these may have.

        Slurm 22.05 keeps the tasks and processors of the nodes that a requeued job had. A range of
        nodes (`--nodes=3-4`) then no longer counts, and a job that was made smaller while it ran
        fits on no such number of nodes.
        """
        size, per_node = self.client.size(self.move.job), _tasks_per_node(job)
        count = size.nodes
        if self.move.least is not None and self.move.least < count:
            listed = self.client.listed_nodes(job.value("Partition"))
            off = {*job.excluded, *self.move.exclude}
            states = {"idle", "reserved"} if job.value("Reservation") else {"idle"}
            free = [n for n in listed if n.state in states or n.name == self.here]
            free_count = sum(node.name not in off for node in free)
            count = max(self.move.least, min(count, free_count))
        tasks = -(-size.tasks * count // size.nodes)
        tasks = min(tasks, per_node * count) if per_node else tasks
        if (count, tasks) != (size.nodes, size.tasks):
            cpus = -(-size.cpus * tasks // size.tasks)
            # The node count too: until then Slurm asks for memory on its former nodes.
            self.client.update_job(
                self.move.job, NumTasks=str(tasks), NumCPUs=str(cpus), NumNodes=str(count)
            )

    def try_to_release(self) -> str:
        """Release the job; return what stands in the way after many tries, empty for nothing.

        Raises:
            NotNeeded: it needs no release any more.
        """
        problem = ""
        for _ in range(TRIES):
            try:
                problem = self._release_once()
            except SlurmError as err:
                problem = str(err)
            if not problem:
                return ""
            self.sleep(SLOW_POLL_S)
        return problem

    def _release_once(self) -> str:
        name, exclude, client = self.move.job, self.move.exclude, self.client
        job = self._waiting()
        if "RUNNING" in job.states:
            if set(job.nodes) & set(exclude):
                held = fold(job.nodes)
                raise NotNeeded(f"the job was released by someone else, and runs on {held}")
            return ""  # an earlier try took effect although it was answered by an error
        if not job.pending:
            return f"the job is {'+'.join(sorted(job.states))}"
        wanted = sorted({*job.excluded, *exclude})
        client.update_job(name, ExcNodeList=fold(wanted))
        if not set(wanted) <= set(client.job(name).excluded):
            return "Slurm did not keep the list of nodes to exclude"
        self._fit_to_nodes(job)
        client.update_job(name, StartTime="now")
        client.release(name)
        after = client.job(name)
        return f"the job is still held ({after.reason})" if after.held else ""

    def _waiting(self) -> Job:
        """Read the job.

        Raises:
            NotNeeded: it has ended, or this attempt of it lies behind the next one.
            SlurmError: Slurm does not answer.
        """
        try:
            job = self.client.job(self.move.job)
        except UnknownJob:
            raise NotNeeded("Slurm has forgotten the job, so it has ended") from None
        if job.ended:
            raise NotNeeded(f"the job has ended ({'+'.join(sorted(job.states))})")
        if job.restarts > self.move.attempt + 1:
            raise NotNeeded("the job was requeued again since, by itself or by others")
        return job

    def explain(self, problem: str) -> None:
        """Say on a job that stays held why, and what to do."""
        name = self.move.job
        excluded: tuple[str, ...] = ()
        with contextlib.suppress(SlurmError):
            excluded = self.client.job(name).excluded
        why = f"it could not be released: {problem}"
        note = leaving_note(name, self.move.exclude, excluded, why)
        self.comment(with_own_comment(note, self.move.comment))

    def comment(self, text: str) -> None:
        """Set the comment of the job."""
        try:
            self.client.update_job(self.move.job, Comment=text)
        except SlurmError as err:
            log.warning("could not set the comment of job %s to %r: %s", self.move.job, text, err)


def _tasks_per_node(job: Job) -> int:
    """Return how many tasks a node of a job has, 0 if the job does not say."""
    return whole_number(job.value("NtasksPerN:B:S:C").partition(":")[0]) or 0


def _record(directory: Path, clock: Callable[[], float], *, succeeded: bool, detail: str) -> None:
    log.info("%s: %s", "released" if succeeded else "not released", detail)
    try:
        writer = journal.Writer(directory, journal.REQUEUE, clock)
        writer.append(ActionDone(action=Action.REQUEUE, succeeded=succeeded, detail=detail))
    except JournalError as err:
        log.warning("%s", err)
