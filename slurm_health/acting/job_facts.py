# SPDX-License-Identifier: Apache-2.0
"""What a job and its owner can do about a verdict, as Slurm and the journals of the job tell."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_health import journal
from slurm_health.acting.requeue_helper import Target
from slurm_health.core.acting.decide import Policy, Situation, unwanted
from slurm_health.core.nodeset import expand, fold
from slurm_health.core.records import ActionIntended, RunStarted, VerdictReached
from slurm_health.errors import JournalError
from slurm_health.slurm.client import Client
from slurm_health.slurm.parsing import Job, Partition

log = logging.getLogger(__name__)


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
    job = client.job(Target.of(started).name)
    return Situation(
        job_id=started.job_id,
        batch_node=started.master_node,
        requeues=requeues_so_far(directory.parent, exclude=directory),
        requeue_obstacle=requeue_obstacle(job, names)
        or too_few_left(job, names, client.partitions(), policy),
        may_drain=may_drain,
        node_reasons={name: node.reason for name, node in states.items() if node.out_of_pool},
        hold_obstacle=hold_obstacle(job),
        held_for=held_for(directory.parent, exclude=directory),
    )


def hold_obstacle(job: Job) -> str:
    """Say why a job cannot be put back into the queue, empty if it can."""
    # 1, and one more each time Slurm itself has put the job back.
    if job.fields.get("BatchFlag", "0") == "0":
        return "it is not a batch job, so it cannot be requeued"
    if job.fields.get("Requeue") != "1":
        return "it may not be requeued (--no-requeue, or the cluster's JobRequeue=0)"
    return ""


def requeue_obstacle(job: Job, bad: Sequence[str]) -> str:
    """Say why a job cannot be started again without these nodes, empty if it can."""
    asked = job.fields.get("ReqNodeList", "(null)")
    wanted = set(expand(asked)) if asked not in {"", "(null)"} else set()
    if not hold_obstacle(job) and wanted & set(bad):
        return f"it asks for {fold(wanted & set(bad))} itself (--nodelist)"
    return hold_obstacle(job)


def too_few_left(
    job: Job, bad: Sequence[str], partitions: Mapping[str, Partition], policy: Policy
) -> str:
    """Say why a requeued job would wait for ever, empty if it would not.

    With more nodes excluded than its partition can do without, Slurm holds it and says no more
    than `BadConstraints`.
    """
    partition = partitions.get(job.fields.get("Partition", ""))
    if partition is None or not partition.names:
        return ""
    left = len(set(partition.names) - {*job.excluded, *bad})
    asked = len(job.nodes) if policy.nodes_needed is None else policy.nodes_needed
    if left >= asked:
        return ""
    return (
        f"partition {partition.name} has {left} nodes without them, and the job needs {asked}:"
        " ask for fewer (--nodes, --min-nodes)"
    )


def requeues_so_far(job_directory: Path, *, exclude: Path) -> int:
    """Count the runs of a job that ended in a requeue, from the journals of earlier attempts.

    A journal that cannot be read counts: a job that moves once too few does less harm than one
    that moves for ever.
    """
    intents = _earlier_intents(job_directory, exclude)
    return sum(run is None or any(act.action == "requeue" for act in run) for run in intents)


def held_for(job_directory: Path, *, exclude: Path) -> frozenset[str]:
    """Return the nodes for which the job was held in an earlier attempt."""
    intents = _earlier_intents(job_directory, exclude)
    return frozenset(
        node for run in intents for act in run or () if act.action == "hold" for node in act.nodes
    )


def _earlier_intents(job_directory: Path, exclude: Path) -> list[list[ActionIntended] | None]:
    """Return what each other run of the job set out to do, None where it cannot be read."""
    if not job_directory.is_dir():
        return []
    runs = [run for run in job_directory.iterdir() if run.is_dir() and run != exclude]
    return [_intents(run) for run in runs]


def _intents(run: Path) -> list[ActionIntended] | None:
    try:
        entries = journal.read_all(run, journal.MASTER)
    except JournalError as err:
        log.warning("%s; counted as a requeue", err)
        return None
    return [entry.record for entry in entries if isinstance(entry.record, ActionIntended)]
