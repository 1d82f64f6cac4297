# SPDX-License-Identifier: Apache-2.0
"""What is known of a job and its owner when it is decided what becomes of it, and notes on jobs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_health.records.nodeset import fold
from slurm_health.records.text import REASON_PREFIX, counted, cut, plain

_OWN = " | own comment: "
_LENGTH = 300  # of a reason within a comment


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What the job and its owner can do, as Slurm and the journals of the job say.

    Args:
        job_id: the job.
        batch_node: where its batch script runs; Slurm never lets a job give that node back.
        requeues: how often it was requeued because of a check.
        no_requeue: why it cannot be requeued, empty if it can.
        named: nodes that it asks for by name.
        partition: where it runs.
        candidates: nodes on which it may run, without those that it excludes; None if unknown.
        narrowed_by: sbatch's options that keep it off the other nodes of the partition.
        needed: with fewer nodes it does not start.
        free: how many nodes like its own it could have at once besides these; None if unknown.
        free_unknown: why that is unknown.
        unusable: nodes of its own that start no job now, with their state.
        may_drain: its user is root, SlurmUser or an administrator.
        drained: nodes that this run has drained, before its master was replaced.
        excluded: nodes that it excludes already.
        left_behind: faulty nodes that it gave back in this attempt, and must not come back to.
        cannot_drop: why it cannot give nodes back, empty if that was not refused.
        placement: sbatch's options for a job that is to start where this one starts.
        idle: idle nodes of its partition that it does not exclude.
        least_there: on fewer nodes no job starts in its partition.
        longest_there_min: nor does one with a longer limit than this, if there is one.
    """

    job_id: int
    batch_node: str
    requeues: int = 0
    no_requeue: str = ""
    named: frozenset[str] = frozenset()
    partition: str = ""
    candidates: frozenset[str] | None = None
    narrowed_by: tuple[str, ...] = ()
    needed: int = 0
    free: int | None = None
    free_unknown: str = "Slurm was not asked for other nodes"
    unusable: Mapping[str, str] = field(default_factory=dict)
    may_drain: bool = False
    drained: frozenset[str] = frozenset()
    excluded: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = ()
    cannot_drop: str = ""
    placement: Mapping[str, str] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()
    least_there: int = 1
    longest_there_min: int | None = None


def requeue_obstacle(facts: JobFacts, nodes: Collection[str]) -> str:
    """Say why a job cannot start again without these nodes at all, empty if it can.

    If it excludes more nodes than its partition can spare, Slurm holds it and says no more than
    `BadConstraints`; if more than its features or its reservation can spare, it waits.
    """
    if facts.no_requeue:
        return facts.no_requeue
    if named := facts.named & set(nodes):
        return f"it asks for {fold(named)} by name (--nodelist)"
    left = _left_without(facts, nodes)
    if left is None or left >= facts.needed:
        return ""
    options = f" for {' '.join(facts.narrowed_by)}" if facts.narrowed_by else ""
    return (
        f"partition {facts.partition} has {left} nodes{options} without"
        f" {fold({*nodes, *facts.left_behind})}, and the job needs"
        f" {facts.needed}: ask for fewer (--nodes=MIN-MAX)"
    )


def wait_obstacle(facts: JobFacts, keep: Collection[str]) -> str:
    """Say why a job that is requeued would not start at once on the nodes `keep` and others.

    What is not known counts as a wait: leaving a slow node is worth seconds, not a place in the
    queue. Slurm marks idle nodes that a pending job is to get; these are not free.
    """
    stuck = {node: state for node, state in facts.unusable.items() if node in keep}
    if stuck:
        states = ", ".join(f"{node} is {state}" for node, state in stuck.items())
        return f"it would have to wait for nodes: {states}"
    more = max(0, facts.needed - len(keep))
    if not more:
        return ""
    if facts.free is None:
        return facts.free_unknown
    if facts.free >= more:
        return ""
    free = "none is free" if not facts.free else f"only {facts.free} free"
    return f"it would have to wait for {counted(more, 'other node')}: {free}"


def submit_without(nodes: Collection[str], facts: JobFacts) -> str:
    """Say how to submit the job again: sbatch refuses a node both asked for and excluded."""
    named, others = facts.named & set(nodes), set(nodes) - facts.named
    how = [f"without {fold(named)} in --nodelist"] if named else []
    how += [f"with --exclude={fold(others)}"] if others else []
    left = _left_without(facts, nodes)
    fewer = left is not None and left < facts.needed
    size = f", on {left} nodes at most (--nodes={left})" if fewer else ""
    return f"submit the job again {' and '.join(how)}{size}"


def _left_without(facts: JobFacts, nodes: Collection[str]) -> int | None:
    return None if facts.candidates is None else len(facts.candidates - set(nodes))


def own_comment(comment: str) -> str:
    """Return the job's own comment, whether or not a note of ours stands before it."""
    return comment.partition(_OWN)[2] if comment.startswith(REASON_PREFIX) else comment


def with_own_comment(note: str, own: str) -> str:
    """Return a note with the job's own comment kept at its end."""
    return f"{note}{_OWN}{own}" if own else note


def leaving_note(job: str, nodes: Sequence[str], excluded: Sequence[str], reason: str) -> str:
    """Return the note on a job that is being moved off some nodes, true whatever comes of it.

    The keys of its commands are in lower case, which scontrol reads as well: a reader of
    `scontrol show job` would take capital ones for fields of the job.
    """
    why = cut(plain(reason).replace(_OWN, " ").replace("=", " "), _LENGTH)
    changes = f"excnodelist={fold([*excluded, *nodes])} starttime=now"
    return (
        f"{REASON_PREFIX} requeued without {fold(nodes)} ({why})."
        " If the job stays held, release it by hand:"
        f" scontrol update jobid={job} {changes}; scontrol release {job}"
    )
