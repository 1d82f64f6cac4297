# SPDX-License-Identifier: Apache-2.0
"""What is known of a job and its owner when it is decided what becomes of it: pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_health.records.nodeset import fold
from slurm_health.records.text import REASON_PREFIX, cut, plain

_OWN = " | own comment: "
_LENGTH = 300  # of a reason within a comment


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What the job and its owner can do, as Slurm and the journals of the job tell.

    Args:
        job_id: the job.
        batch_node: where its batch script runs; Slurm never lets a job drop that node.
        requeues: how often it was requeued because of a check.
        hold_obstacle: why it cannot be put back into the queue, empty if it can.
        named: nodes that it asks for by name.
        partition: where it runs.
        neighbours: that partition, and the others that have nodes of it.
        candidates: the nodes of that partition that it does not exclude already; None where Slurm
            does not say.
        asked: with fewer nodes it does not start.
        wait: why it would have to wait if it left its slow nodes too; empty where Slurm has been
            asked and says that it could start at once.
        held_for: nodes that it was held for before. A person has released it since, and that is
            the answer about those nodes.
        may_drain: the user is root, SlurmUser or an administrator.
        drained: nodes that this run has drained, before its master was replaced.
        excluded: nodes that it excludes already.
        left_behind: faulty nodes that it gave back in this attempt; it is not to come back to them.
        give_back_obstacle: why it cannot give nodes back, empty where that has not been refused.
        placement: sbatch's options for a job that is to start where this one starts.
    """

    job_id: int
    batch_node: str
    requeues: int = 0
    hold_obstacle: str = ""
    named: frozenset[str] = frozenset()
    partition: str = ""
    neighbours: tuple[str, ...] = ()
    candidates: frozenset[str] | None = None
    asked: int = 0
    wait: str = "Slurm was not asked for other nodes"
    held_for: frozenset[str] = frozenset()
    may_drain: bool = False
    drained: frozenset[str] = frozenset()
    excluded: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = ()
    give_back_obstacle: str = ""
    placement: Mapping[str, str] = field(default_factory=dict)


def requeue_obstacle(facts: JobFacts, nodes: Collection[str]) -> str:
    """Say why a job cannot be started again without these nodes at all, empty if it can.

    With more nodes excluded than its partition can do without, Slurm would hold it and say no more
    than `BadConstraints`.
    """
    if facts.hold_obstacle:
        return facts.hold_obstacle
    named = facts.named & set(nodes)
    if named:
        return f"it asks for {fold(named)} by name (--nodelist)"
    if facts.candidates is None:
        return ""
    left = len(facts.candidates - set(nodes))
    if left >= facts.asked:
        return ""
    return (
        f"partition {facts.partition} has {left} nodes without"
        f" {fold({*nodes, *facts.left_behind})}, and the job needs"
        f" {facts.asked}: ask for fewer (--nodes, --min-nodes)"
    )


def _most_without(facts: JobFacts, nodes: Collection[str]) -> int | None:
    """Return how many nodes are left for a job that needs more; None where there are enough."""
    left = facts.candidates - set(nodes) if facts.candidates is not None else ()
    short = facts.candidates is not None and len(left) < facts.asked
    return len(left) if short else None


def submit_without(nodes: Collection[str], facts: JobFacts) -> str:
    """Say how to submit the job again: sbatch refuses a node both asked for and excluded."""
    named, others = facts.named & set(nodes), set(nodes) - facts.named
    how = [f"without {fold(named)} in --nodelist"] if named else []
    how += [f"with --exclude={fold(others)}"] if others else []
    most = _most_without(facts, nodes)
    fewer = "" if most is None else f", on {most} nodes at most (--nodes={most})"
    return f"submit the job again {' and '.join(how)}{fewer}"


def own_comment(comment: str) -> str:
    """Return the job's own comment, whether or not a note of ours stands before it."""
    return comment.partition(_OWN)[2] if comment.startswith(REASON_PREFIX) else comment


def leaving_note(job: str, nodes: Sequence[str], excluded: Sequence[str], reason: str) -> str:
    """Return the note on a job that is being moved off some nodes, true whatever comes of it."""
    how = release_without(job, [*excluded, *nodes])
    return (
        f"{REASON_PREFIX} requeued without {fold(nodes)} ({_cut(reason)})."
        f" If the job stays held, release it by hand: {how}"
    )


def waiting_note(job: str, nodes: Sequence[str], excluded: Sequence[str], reason: str) -> str:
    """Return the note on a job that waits for a person."""
    how = release_without(job, [*excluded, *nodes])
    return (
        f"{REASON_PREFIX} held ({_cut(reason)}). To run it without {fold(nodes)}: {how}."
        f" To run it anyway: scontrol release {job}"
    )


def with_own_comment(note: str, own: str) -> str:
    """Return a note with the job's own comment kept at its end."""
    return f"{note}{_OWN}{own}" if own else note


def release_without(job: str, excluded: Sequence[str]) -> str:
    """Return the commands that release a job without some nodes.

    The keys are in lower case, which scontrol reads as well: capital ones would be taken for
    fields of the job by whoever reads `scontrol show job`.
    """
    changes = f"excnodelist={fold(excluded)} starttime=now"
    return f"scontrol update jobid={job} {changes}; scontrol release {job}"


def _cut(reason: str) -> str:
    return cut(plain(reason).replace(_OWN, " ").replace("=", " "), _LENGTH)
