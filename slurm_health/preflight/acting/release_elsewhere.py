# SPDX-License-Identifier: Apache-2.0
"""Let a requeued job go, but not to its bad nodes. Runs in the helper job, after the first attempt.

It waits until the job is pending, gives it the nodes to exclude and a start time of now, reads back
that this took effect, and releases it. Whatever becomes of the helper, the job carries a comment
that says how to release it by hand; the helper takes that away at its end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurm_health.preflight.acting.requeue_helper import Move
from slurm_health.preflight.acting.usable_nodes import usable_nodes
from slurm_health.preflight.decide.facts import leaving_note, with_own_comment
from slurm_health.records.errors import JournalError, SlurmError, UnknownJob
from slurm_health.records.nodeset import fold
from slurm_health.records.records import Action, ActionDone
from slurm_health.records.text import whole_number
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Job, Node, Size

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
# Idle nodes that are not to be had: for a pending job of a higher priority, or for a reservation.
_PLANNED, _RESERVED = frozenset({"PLANNED"}), frozenset({"RESERVED"})


class Here(NamedTuple):
    """The helper job itself, and its node."""

    job: int
    node: str


class NotNeeded(Exception):
    """There is nothing left to do for the job; the message says why."""


def release_elsewhere(
    move: Move,
    *,
    directory: Path,
    client: Client,
    here: Here | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Release the job without the nodes it leaves; tell whether it was.

    The job is released only after Slurm has been seen to have taken the list, and only if it is
    still waiting for that: not when it has ended, or was released and requeued by others since. A
    job that cannot be released stays held, and its comment says why. One that makes do with fewer
    nodes asks for no more than are free, or, where it keeps its size, than there are.
    """
    release = _Release(move=move, client=client, here=here, clock=clock, sleep=sleep)
    try:
        release.await_pending()
        sleep(release.pause_s())
        smaller = release.ask_for_fewer()
        problem = release.try_to_release()
    except NotNeeded as reason:
        _record(directory, clock, succeeded=False, detail=str(reason))
        return False
    if problem:
        release.explain(problem)
        _record(directory, clock, succeeded=False, detail=f"left held: {problem}")
        return False
    release.comment(move.comment)
    _record(directory, clock, succeeded=True, detail=f"without {fold(move.exclude)}{smaller}")
    return True


@dataclass(frozen=True, kw_only=True)
class _Release:
    """The steps of one release. Each reads the job anew: others may act on it too."""

    move: Move
    client: Client
    here: Here | None
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

    def ask_for_fewer(self) -> str:
        """Fit the job to the nodes there are; return what is to be said of it.

        Slurm lets a job wait without end for nodes that are drained or in use by others, and holds
        it as `BadConstraints` where it excludes too many. One that cannot be made smaller is
        released as it is: it waits, as it would have.
        """
        if self.move.least is None:
            return ""
        try:
            count = self._count_to_ask(self.move.least)
        except SlurmError as err:
            log.warning("could not reduce the node count of job %s: %s", self.move.job, err)
            return ", with its node count, which could not be reduced"
        return f", with a node count of {count}, as no more nodes are available" if count else ""

    def _count_to_ask(self, least: int) -> int:
        """Let the job ask for fewer nodes if too few are there; return how many, 0 for as is."""
        job = self._waiting()
        if not job.pending:
            return 0
        size = self._size_that_fits(job)
        if size.nodes <= least:
            return 0
        nodes = usable_nodes(job, self.client.partitions(), self.client).nodes
        usable = sorted(nodes - {*job.excluded, *self.move.exclude})
        states = self.client.nodes(usable) if usable else {}
        taken = _PLANNED if job.value("Reservation") else _PLANNED | _RESERVED
        count = max(least, self._available(states, taken))
        if not states or count >= size.nodes:
            return 0
        self.client.update_job(self.move.job, **_fewer(size, count))
        return count

    def _size_that_fits(self, job: Job) -> Size:
        """Return the size of the job, with no more tasks than its nodes may have.

        One that was made smaller while it ran keeps the tasks and processors of its former nodes
        when it is requeued (Slurm 22.05), and then fits on no such number of nodes.
        """
        size = self.client.size(self.move.job)
        per_node = whole_number(job.value("NtasksPerN:B:S:C").partition(":")[0]) or 0
        most = per_node * size.nodes
        if not per_node or size.tasks <= most:
            return size
        cpus = -(-size.cpus * most // size.tasks)
        fitting = Size(nodes=size.nodes, tasks=most, cpus=cpus)
        # Its node count is told again: until then Slurm asks for memory on its former nodes.
        self.client.update_job(self.move.job, **_fields(fitting), NumNodes=str(size.nodes))
        return fitting

    def _available(self, states: Mapping[str, Node], taken: frozenset[str]) -> int:
        """Count the nodes that the job can wait for, or start on at once if it is to do that."""
        pool = [node for node in states.values() if not node.out_of_pool]
        if self.move.keep_size:
            return len(pool)
        free = [node for node in pool if not node.states & taken]
        return sum(node.idle or self._has_only_this_helper(node.name) for node in free)

    def _has_only_this_helper(self, node: str) -> bool:
        here = self.here
        return here is not None and node == here.node and self.client.jobs_on(node) == [here.job]

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


def _fewer(size: Size, nodes: int) -> dict[str, str]:
    """Return the fields of a job of `size` once it asks for fewer nodes, each with as much.

    Slurm takes the nodes down by itself, but not the tasks and processors that follow from them:
    the job would then ask for more of each node than it has.
    """
    tasks, cpus = -(-size.tasks * nodes // size.nodes), -(-size.cpus * nodes // size.nodes)
    smaller = Size(nodes=nodes, tasks=tasks, cpus=cpus)
    return {**_fields(smaller), "NumNodes": f"{nodes}-{size.nodes}"}


def _fields(size: Size) -> dict[str, str]:
    return {"NumTasks": str(size.tasks), "NumCPUs": str(size.cpus)}


def _record(directory: Path, clock: Callable[[], float], *, succeeded: bool, detail: str) -> None:
    log.info("%s: %s", "released" if succeeded else "not released", detail)
    try:
        writer = journal.Writer(directory, journal.REQUEUE, clock)
        writer.append(ActionDone(action=Action.REQUEUE, succeeded=succeeded, detail=detail))
    except JournalError as err:
        log.warning("%s", err)
