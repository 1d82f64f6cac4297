# SPDX-License-Identifier: Apache-2.0
"""What a job and its owner can do about a verdict, as Slurm and the journals of the job tell."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_health.preflight.acting.usable_nodes import usable_nodes
from slurm_health.preflight.decide.decide import Case, decide_unasked, question
from slurm_health.preflight.decide.decision import Ending, StartQuestion
from slurm_health.preflight.decide.facts import (
    JobFacts,
    obstacle_to_asking,
    request,
    wait_behind_jobs,
    wait_for_nodes,
)
from slurm_health.preflight.decide.policy import Policy
from slurm_health.records.allocation import Estimate, is_of_another_job
from slurm_health.records.errors import JournalError, SlurmCommandError, SlurmError
from slurm_health.records.nodeset import fold
from slurm_health.records.records import (
    Action,
    ActionDone,
    ActionIntended,
    Record,
    RunStarted,
    VerdictReached,
)
from slurm_health.records.verdict import Level
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Job

log = logging.getLogger(__name__)

# What another job has to share with this one to start where it starts: sbatch's option, the field.
_PLACEMENT = {
    "partition": "Partition",
    "account": "Account",
    "qos": "QOS",
    "reservation": "Reservation",
}
# Of an idle node: a waiting job is to have it, or a reservation has it.
_TAKEN = frozenset({"PLANNED", "RESERVED"})
# What each run of the job before this one set out to do; None for one that cannot be read.
Earlier = Sequence[Sequence[ActionIntended] | None]


def read_case(
    verdict: VerdictReached,
    policy: Policy,
    *,
    started: RunStarted,
    directory: Path,
    client: Client,
    uid: int,
    clock: Callable[[], float],
) -> Case | Ending:
    """Return all that is to be decided by, read once; how the run ends if Slurm does not answer.

    Raises:
        JournalError: what this run has done so far cannot be read.
    """
    facts = JobFacts(job_id=started.job_id, batch_node=started.master_node)
    case = Case.of(verdict, policy, facts)
    if not case.unwanted:  # where all is well there is nothing to ask Slurm about
        return case
    try:
        facts = read_facts(policy, started=started, directory=directory, client=client, uid=uid)
    except SlurmError as err:
        return decide_unasked(verdict, case.unwanted, policy, str(err))
    case = replace(case, facts=facts)
    asked = question(case)
    if asked is None:
        return case
    return case.waiting(
        _wait(asked, job=started.slurm_name, facts=facts, client=client, now_s=clock())
    )


def read_facts(
    policy: Policy,
    *,
    started: RunStarted,
    directory: Path,
    client: Client,
    uid: int,
) -> JobFacts:
    """Ask Slurm and the journal, once, what the job and its owner can do about bad nodes.

    Raises:
        SlurmError: Slurm does not answer.
        JournalError: what this run has done so far cannot be read.
    """
    job = client.job(started.slurm_name)
    partitions = client.partitions()
    usable = usable_nodes(job, partitions, client)
    names = usable.partition_nodes
    earlier = earlier_runs(directory, started)
    behind = left_behind(directory, started, job.nodes)
    excluded = {*job.excluded, *behind}
    return JobFacts(
        job_id=started.job_id,
        batch_node=started.master_node,
        requeues=requeues(earlier),
        hold_obstacle=hold_obstacle(job),
        named=frozenset(job.required),
        partition=job.value("Partition"),
        neighbours=tuple(name for name, each in partitions.items() if names & {*each.names}),
        candidates=usable.nodes - excluded if names else None,
        narrowed_by=usable.narrowed_by,
        room=names - excluded,
        asked=len(job.nodes) if policy.nodes_needed is None else policy.nodes_needed,
        held_for=held_for(earlier),
        may_drain=client.may_drain(uid),
        drained=drained(directory),
        excluded=job.excluded,
        left_behind=behind,
        placement=placement(job),
        least_there=max(
            (each.min_nodes for name, each in partitions.items() if name == job.value("Partition")),
            default=1,
        ),
    )


def hold_obstacle(job: Job) -> str:
    """Say why a job cannot be put back into the queue, empty if it can."""
    # 1, and one more each time Slurm itself has put the job back.
    if job.fields.get("BatchFlag", "0") == "0":
        return "it is not a batch job, so it cannot be requeued"
    if job.fields.get("Requeue") != "1":
        return "it may not be requeued (--no-requeue, or JobRequeue=0 in slurm.conf)"
    return ""


def placement(job: Job) -> dict[str, str]:
    """Return sbatch's options for a job that is to start where this one starts."""
    found = {option: job.value(key) for option, key in _PLACEMENT.items()}
    return {option: value for option, value in found.items() if value}


def kept_off(
    name: str, client: Client, room: Collection[str], *, nodes: int = 1
) -> tuple[str, ...]:
    """Return nodes of a job that its helper, which needs so many, must not run on: all, or none.

    The job starts where the helper ends. Where nodes forget an ended attempt late
    (`Client.forgets_late`), those that had one are left to the job, if the helper can start on
    others at once. In a reservation it is not known to be able to.

    Raises:
        SlurmError: Slurm does not answer.
    """
    if not client.forgets_late():
        return ()
    job = client.job(name)
    others = sorted(set(room) - set(job.nodes))
    if not others or job.value("Reservation"):
        return ()
    states = client.nodes(others).values()
    free = sum(node.idle and not node.out_of_pool and not node.states & _TAKEN for node in states)
    return tuple(job.nodes) if free >= nodes else ()


def earlier_runs(own: Path, started: RunStarted) -> Earlier:
    """Return what each other run of the job set out to do; a run has its own directory.

    An older job that had the same id is passed over.
    """
    if not own.parent.is_dir():
        return []
    runs = [run for run in own.parent.iterdir() if run.is_dir() and run != own]
    told = [_records(run) for run in runs]
    return [_intents(records) for records in told if not _of_another_job(records, started)]


def left_behind(own: Path, started: RunStarted, held: Collection[str]) -> tuple[str, ...]:
    """Return the nodes that earlier checks of this attempt found faulty, and it no longer holds."""
    faulty = {
        node.node
        for run in (own.parent.iterdir() if own.parent.is_dir() else ())
        if run != own and (journal.attempt_and_check(run.name) or (-1,))[0] == started.attempt
        for record in _of_this_job(_records(run), started)
        if isinstance(record, VerdictReached)
        for node in record.nodes
        if node.level is Level.FAULTY
    }
    return tuple(sorted(faulty - {*held}))


def requeues(earlier: Earlier) -> int:
    """Count the runs that ended in a requeue.

    A journal that cannot be read counts: a job that moves once too few does less harm than one
    that moves for ever.
    """
    return sum(run is None or any(act.action is Action.REQUEUE for act in run) for run in earlier)


def held_for(earlier: Earlier) -> frozenset[str]:
    """Return the nodes for which the job was held."""
    acts = [act for run in earlier for act in run or ()]
    return frozenset(node for act in acts if act.action is Action.HOLD for node in act.nodes)


def drained(run: Path) -> frozenset[str]:
    """Return the nodes that a run has drained."""
    records = [entry.record for entry in journal.read_all(run, journal.MASTER)]
    return frozenset(
        node
        for record in records
        if isinstance(record, ActionDone) and record.action is Action.DRAIN and record.succeeded
        for node in record.nodes
    )


def _records(run: Path) -> list[Record | None] | None:
    """Return what a run has recorded, None for what is of an unknown kind."""
    try:
        return [entry.record for entry in journal.read_all(run, journal.MASTER)]
    except JournalError as err:
        log.warning("%s; counted as a requeue", err)
        return None


def _of_another_job(records: Sequence[Record | None] | None, started: RunStarted) -> bool:
    """Tell whether a run is known to be of a job that had this one's id before it."""
    begun = next((each for each in records or () if isinstance(each, RunStarted)), None)
    return begun is not None and is_of_another_job(begun, started)


def _of_this_job(
    records: Sequence[Record | None] | None, started: RunStarted
) -> Sequence[Record | None]:
    return () if _of_another_job(records, started) else records or ()


def _intents(records: Sequence[Record | None] | None) -> list[ActionIntended] | None:
    if records is None:
        return None
    return [record for record in records if isinstance(record, ActionIntended)]


def cause(err: SlurmError) -> str:
    """Return what Slurm said, without the command line, which fills a line or a comment."""
    if not isinstance(err, SlurmCommandError):
        return str(err)
    return " / ".join(line.strip() for line in err.stderr.splitlines() if line.strip()) or str(err)


def _wait(
    question: StartQuestion, *, job: str, facts: JobFacts, client: Client, now_s: float
) -> str:
    """Say why the job would have to wait, empty if it could start at once.

    What Slurm does not tell, or will not promise, is a wait. `job` is what Slurm calls the job.
    """
    try:
        if not facts.may_drain and client.hides_jobs():
            return "Slurm does not show which jobs of others wait for nodes (PrivateData=jobs)"
        waiting = client.waiting(facts.neighbours or (facts.partition,))
        return wait_behind_jobs(job, facts.partition, waiting) or _wait_for_free_nodes(
            question, job=job, facts=facts, client=client, now_s=now_s
        )
    except SlurmError as err:
        return f"Slurm promises it no other nodes: {cause(err)}"


def _wait_for_free_nodes(
    question: StartQuestion, *, job: str, facts: JobFacts, client: Client, now_s: float
) -> str:
    estimate: Estimate | None = None
    if question.more:
        fields, has = client.in_full(job, question.leave[0])
        obstacle = obstacle_to_asking(fields)
        if obstacle:
            return f"whether it would have to wait for nodes is unknown: {obstacle}"
        options = request(fields, has, facts.placement, more=question.more)
        # Its own nodes are no further ones: Slurm would count them in for when the job ends.
        avoid = fold([*facts.excluded, *question.leave, *question.keep])
        estimate = client.estimate([*options, f"--exclude={avoid}"])
    names = (*question.keep, *(estimate.nodes if estimate else ()))
    states = client.nodes(sorted(set(names)))
    unusable = {name: node.state for name, node in states.items() if node.out_of_pool}
    return wait_for_nodes(question.more, estimate, unusable, now_s=now_s)
