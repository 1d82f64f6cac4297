# SPDX-License-Identifier: Apache-2.0
"""One run of a sweep: asks Slurm and the history, chooses nodes, submits a job for each group.

A job's journal is in the history once it has begun, and a run asks the history when each node was
checked last: so a sweep that was ended goes on where it stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_health.fleet.history.index import Index
from slurm_health.fleet.sweep import choice as sweep
from slurm_health.fleet.sweep import outcome
from slurm_health.records.errors import UnknownJob, UsageError
from slurm_health.records.nodeset import fold
from slurm_health.system.slurm.client import Client

JOB_NAME = "slurm-health-sweep"
# All other jobs go first: the most that every release of Slurm takes from a user.
_NICE = 1_000_000
# A check that has not begun by then is no longer wanted: the next run sees who is idle then.
_WAITS_MIN = 10


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a sweep is to do; `check` are the words of `slurm-health check`.

    `output` is where a job writes, as sbatch names it.
    """

    partition: str
    share: float
    size: int
    every_s: float
    limit_min: int
    check: Sequence[str]
    sbatch: Sequence[str]
    output: str = "/dev/null"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a run has chosen, and why not more."""

    groups: Sequence[tuple[str, ...]]
    idle: int
    due: int
    in_checks: int
    most: int


def choose(client: Client, index: Index, wishes: Wishes, *, uid: int, now_s: float) -> Turn:
    """Return whom to check now.

    Raises:
        UsageError: there is no such partition.
        SlurmError: Slurm cannot be asked.
    """
    partitions = client.partitions()
    partition = partitions.get(wishes.partition)
    if partition is None:
        there = ", ".join(sorted(partitions))
        raise UsageError(f"Slurm has no partition {wishes.partition!r}; it has {there}")
    cluster = client.cluster_name()
    nodes = client.nodes()
    taken = _in_checks(client, uid)
    idle = [
        name
        for name in partition.names
        if name not in taken and name in nodes and nodes[name].idle and not nodes[name].out_of_pool
    ]
    in_checks = len(taken.intersection(partition.names))
    checked = index.last_checks(cluster)
    last_s = {name: checked.get(name, 0.0) for name in idle}
    # A check that was cut short, as one that gave way to a job, leaves its nodes due.
    judged = index.last_verdicts(cluster, uid=uid)
    due = {name for name in idle if judged.get(name, 0.0) < now_s - wishes.every_s}
    most = sweep.at_once(len(partition.names), wishes.share)
    return Turn(
        groups=sweep.groups(
            last_s,
            sweep.met(index.checks(cluster), last_s),
            due=due,
            size=wishes.size,
            room=most - in_checks,
        ),
        idle=len(idle),
        due=len(due),
        in_checks=in_checks,
        most=most,
    )


def _in_checks(client: Client, uid: int) -> set[str]:
    """Return the nodes of the sweep's jobs that wait or run."""
    taken: set[str] = set()
    for job_id in client.jobs_named(JOB_NAME, uid):
        with contextlib.suppress(UnknownJob):  # it has just ended
            job = client.job(job_id)
            taken.update(job.nodes or job.required)
    return taken


def submit(client: Client, group: Sequence[str], wishes: Wishes, environ: Mapping[str, str]) -> int:
    """Submit the check of one group; return the job's id."""
    return client.submit(options(group, wishes), outcome.script(wishes.check), environ)


def options(group: Sequence[str], wishes: Wishes) -> list[str]:
    """Return the options of sbatch for the check of one group."""
    return [
        f"--job-name={JOB_NAME}",
        f"--partition={wishes.partition}",
        f"--nodelist={fold(group)}",
        f"--nodes={len(group)}",
        "--ntasks-per-node=1",
        "--exclusive",
        f"--nice={_NICE}",
        f"--time={wishes.limit_min}",
        f"--deadline=now+{wishes.limit_min + _WAITS_MIN}minutes",
        "--no-requeue",  # preempted, it leaves; the next run checks who is idle then
        f"--output={wishes.output}",
        "--chdir=/",
        *wishes.sbatch,
    ]
