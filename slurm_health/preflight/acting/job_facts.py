# SPDX-License-Identifier: Apache-2.0
"""What a job and its owner can do about a verdict, as Slurm and the journals of the job say."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from slurm_health.preflight.decide.facts import JobFacts
from slurm_health.preflight.decide.policy import Policy
from slurm_health.records.allocation import is_of_another_job
from slurm_health.records.errors import JournalError, SlurmCommandError, SlurmError
from slurm_health.records.records import (
    Action,
    ActionDone,
    ActionIntended,
    RunStarted,
    VerdictReached,
)
from slurm_health.records.verdict import Level
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Job, ListedNode, nodes_of

log = logging.getLogger(__name__)

# What another job has to share with this one to start where it starts: sbatch's option, the field.
_PLACEMENT = {
    "partition": "Partition",
    "account": "Account",
    "qos": "QOS",
    "reservation": "Reservation",
}
# Features of which a node must have all. What else a constraint may be is left to Slurm:
# `a|b`, `[rack1|rack2]`, `fast*2`, `(a&b)|c`.
_ALL_OF = re.compile(r"[\w.=+-]+(?:[&,][\w.=+-]+)*")

# A job that is requeued ends that much later than it would have: its check, and the requeue.
_MOVE = timedelta(minutes=10)


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
    listed = client.listed_nodes(job.value("Partition")) if job.value("Partition") else []
    requeues, behind = past(directory, started, job.nodes)
    excluded = {*job.excluded, *behind}
    reservations: Mapping[str, Mapping[str, str]] = {}
    free_unknown = _about_all_nodes(job)
    try:
        reservations = client.reservations()
    except SlurmError as err:
        free_unknown = f"which nodes are reserved is unknown: {err}"
    usable, narrowed_by = _usable(job, listed, reservations)
    elsewhere = [n for n in listed if n.name not in excluded and n.name not in job.nodes]
    return JobFacts(
        job_id=started.job_id,
        batch_node=started.master_node,
        requeues=requeues,
        no_requeue=_no_requeue(job),
        named=frozenset(job.required),
        partition=job.value("Partition"),
        candidates=frozenset(usable - excluded) if listed else None,
        narrowed_by=narrowed_by,
        needed=len(job.nodes) if policy.nodes_needed is None else policy.nodes_needed,
        free=None if free_unknown else _free(job, listed, usable - excluded, reservations),
        free_unknown=free_unknown,
        unusable={n.name: n.state for n in listed if n.name in job.nodes and n.out_of_pool},
        may_drain=client.may_drain(uid),
        drained=drained(directory),
        excluded=job.excluded,
        left_behind=behind,
        placement=placement(job),
        idle=frozenset(n.name for n in elsewhere if n.state == "idle"),
        least_there=max((node.least for node in listed), default=1),
        longest_there_min=min((n.limit_min for n in listed if n.limit_min), default=None),
    )


def _usable(
    job: Job, listed: Sequence[ListedNode], reservations: Mapping[str, Mapping[str, str]]
) -> tuple[set[str], tuple[str, ...]]:
    """Return the nodes on which a job may run, and sbatch's options that rule others out.

    What is not understood rules no node out; nor does what a job asks for if it runs on other
    nodes.
    """
    usable = {node.name for node in listed}
    constraint, reservation = job.value("Features"), job.value("Reservation")
    wishes: list[tuple[str, set[str]]] = []
    if constraint and _ALL_OF.fullmatch(constraint):
        wanted = set(re.split("[&,]", constraint))
        with_features = {node.name for node in listed if wanted <= {*node.features}}
        wishes.append((f"--constraint={constraint}", with_features))
    if reservation:
        own = [reservations.get(name, {}) for name in reservation.split(",")]
        if all(map(_keeps_its_nodes, own)):
            nodes = {node for fields in own for node in nodes_of(fields.get("Nodes", ""))}
            wishes.append((f"--reservation={reservation}", nodes))
    narrowed_by: list[str] = []
    for option, nodes in wishes:
        if usable & nodes < usable and nodes.issuperset(job.nodes):
            usable &= nodes
            narrowed_by.append(option)
    return usable, tuple(narrowed_by)


def _keeps_its_nodes(reservation: Mapping[str, str]) -> bool:
    """Tell whether a reservation has these nodes only, and no others for those that are drained.

    Slurm replaces nodes that it has chosen itself, and with FLEX a job may run on others too.
    """
    flags = reservation.get("Flags", "").split(",")
    replaced = any(flag.startswith("REPLACE") for flag in flags)
    return "FLEX" not in flags and ("STATIC" in flags or ("SPEC_NODES" in flags and not replaced))


def _about_all_nodes(job: Job) -> str:
    """Say which wish of a job concerns all of its nodes together, empty if none does.

    Whether some of them can be exchanged for free ones is then unknown.
    """
    unknown = "whether it would have to wait for nodes is unknown"
    features = job.value("Features")
    if re.search(r"[\[*|(]", features):
        return f"{unknown}: --constraint={features} is about all of its nodes together"
    if job.value("Contiguous") == "1":
        return f"{unknown}: its nodes are to be next to each other (--contiguous)"
    if job.value("ReqSwitch"):
        return f"{unknown}: its nodes are to share switches (--switches)"
    return ""


def _free(
    job: Job,
    listed: Sequence[ListedNode],
    usable: Collection[str],
    reservations: Mapping[str, Mapping[str, str]],
) -> int:
    """Count the nodes, with hardware that one of the job's nodes has, that it could have at once.

    A node that a pending job is to get is `planned`; one of a reservation is free for its jobs. One
    that others have reserved from a time before the job's end is not free.
    """
    own = job.value("Reservation").split(",")
    end = _read_time(job.value("EndTime"))
    taken = {
        node
        for name, fields in reservations.items()
        if name not in own and _read_time(fields.get("StartTime", "")) <= end + _MOVE
        for node in nodes_of(fields.get("Nodes", ""))
    }
    states = {"idle", "reserved"} if job.value("Reservation") else {"idle"}
    hardware = {node.hardware for node in listed if node.name in job.nodes}
    return sum(
        node.state in states and node.hardware in hardware
        for node in listed
        if node.name in usable and node.name not in {*job.nodes, *taken}
    )


def _read_time(text: str) -> datetime:
    """Return a time as scontrol prints it, the end of time if it prints none: `Unknown`."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return datetime.max - 2 * _MOVE


def _no_requeue(job: Job) -> str:
    """Say why a job cannot be requeued, empty if it can."""
    # 1, and one more each time Slurm itself has put the job back.
    if job.fields.get("BatchFlag", "0") == "0":
        return "it is not a batch job, so it cannot be requeued"
    if job.fields.get("Requeue") != "1":
        return "it may not be requeued (--no-requeue, or JobRequeue=0 in slurm.conf)"
    return ""


def placement(job: Job) -> dict[str, str]:
    """Return sbatch's options for a job that is to start where this one starts."""
    values = {option: job.value(key) for option, key in _PLACEMENT.items()}
    return {option: value for option, value in values.items() if value}


def past(own: Path, started: RunStarted, held: Collection[str]) -> tuple[int, tuple[str, ...]]:
    """Return what the other checks of a job did, which have directories beside `own`.

    That is how often they requeued it, and the nodes that those of this attempt found faulty and it
    no longer holds. An older job that had the same id is passed over. A journal that cannot be read
    counts as a requeue: a job that moves once too few does less harm than one that moves for ever.
    """
    requeues, faulty = 0, set[str]()
    for run in own.parent.iterdir() if own.parent.is_dir() else ():
        if run == own or not run.is_dir():
            continue
        try:
            records = [entry.record for entry in journal.read_all(run, journal.MASTER)]
        except JournalError as err:
            log.warning("%s; counted as a requeue", err)
            requeues += 1
            continue
        begun = next((record for record in records if isinstance(record, RunStarted)), None)
        if begun is not None and is_of_another_job(begun, started):
            continue
        requeues += any(
            isinstance(record, ActionIntended) and record.action is Action.REQUEUE
            for record in records
        )
        label = journal.attempt_and_check(run.name)
        if label is not None and label[0] == started.attempt:
            faulty |= {
                node.node
                for record in records
                if isinstance(record, VerdictReached)
                for node in record.nodes
                if node.level is Level.FAULTY
            }
    return requeues, tuple(sorted(faulty - {*held}))


def drained(run: Path) -> frozenset[str]:
    """Return the nodes that a run has drained."""
    records = [entry.record for entry in journal.read_all(run, journal.MASTER)]
    return frozenset(
        node
        for record in records
        if isinstance(record, ActionDone) and record.action is Action.DRAIN and record.succeeded
        for node in record.nodes
    )


def cause(err: SlurmError) -> str:
    """Return what Slurm said, without the command line, which fills a line or a comment."""
    if not isinstance(err, SlurmCommandError):
        return str(err)
    return " / ".join(line.strip() for line in err.stderr.splitlines() if line.strip()) or str(err)
