# SPDX-License-Identifier: Apache-2.0
"""What is known of a job and its owner when it is decided what becomes of it: pure.

And whether a job that leaves its slow nodes could start again at once: leaving a slow node is worth
seconds, not a wait in the queue. What is not known for sure counts as a wait: the job then runs
where it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_health.records.allocation import Estimate
from slurm_health.records.nodeset import fold
from slurm_health.records.text import REASON_PREFIX, counted, cut, plain

_OWN = " | own comment: "
_LENGTH = 300  # of a reason within a comment
# That much later is still at once: nodes that are cleaned up after a job, and clocks that differ.
SOON_S = 60.0
# What a pending job may wait for although nodes are free. One that waits for anything else, a limit
# of its owner included, might be given the nodes that a requeued job leaves for some seconds.
_NOT_FOR_NODES = ("BeginTime", "Dependency", "JobHeld", "JobHold", "BadConstraints")
# So ends what Slurm says of a job that it has put back and holds (`scontrol requeuehold`, a failed
# prolog): it is not in one word.
_REQUEUED_AND_HELD = ("requeued in held state", "requeued held")
_FOR_ITS_ARRAY = "JobArrayTaskLimit"
# A constraint that is about all nodes of the job together: `[rack1|rack2]`, `fast*2&big*2`.
_OF_ALL_NODES = re.compile(r"[\[*]")
_NAMED = 3  # jobs that are named before the rest is only counted
_YEAR_S = 365 * 86400.0
_FIELDS = {"Features": "constraint", "MinTmpDiskNode": "tmp", "TimeLimit": "time"}


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
        candidates: the nodes of that partition on which it may run, without those that it excludes
            already; None where Slurm does not say.
        narrowed_by: sbatch's options for which it may not run on the others of the partition.
        room: the nodes of that partition that it does not exclude, whatever it asks for.
        asked: with fewer nodes it does not start.
        wait: why it would have to wait if it left its slow nodes too; empty where Slurm has been
            asked and says that it could start at once.
        held_for: nodes that it was held for before. A person has released it since, and that is
            the answer about those nodes: it runs on them where it cannot leave them.
        may_drain: the user is root, SlurmUser or an administrator.
        drained: nodes that this run has drained, before its master was replaced.
        excluded: nodes that it excludes already.
        left_behind: faulty nodes that it gave back in this attempt; it is not to come back to them.
        give_back_obstacle: why it cannot give nodes back, empty where that has not been refused.
        placement: sbatch's options for a job that is to start where this one starts.
        least_there: on fewer nodes no job starts in its partition.
    """

    job_id: int
    batch_node: str
    requeues: int = 0
    hold_obstacle: str = ""
    named: frozenset[str] = frozenset()
    partition: str = ""
    neighbours: tuple[str, ...] = ()
    candidates: frozenset[str] | None = None
    narrowed_by: tuple[str, ...] = ()
    room: frozenset[str] = frozenset()
    asked: int = 0
    wait: str = "Slurm was not asked for other nodes"
    held_for: frozenset[str] = frozenset()
    may_drain: bool = False
    drained: frozenset[str] = frozenset()
    excluded: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = ()
    give_back_obstacle: str = ""
    placement: Mapping[str, str] = field(default_factory=dict)
    least_there: int = 1


def requeue_obstacle(facts: JobFacts, nodes: Collection[str]) -> str:
    """Say why a job cannot be started again without these nodes at all, empty if it can.

    With more nodes excluded than its partition can do without, Slurm would hold it and say no more
    than `BadConstraints`; with more than its features or its reservation can, it would wait.
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
    options = f" for {' '.join(facts.narrowed_by)}" if facts.narrowed_by else ""
    return (
        f"partition {facts.partition} has {left} nodes{options} without"
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


def wait_behind_jobs(job: str, partition: str, waiting: Mapping[str, str]) -> str:
    """Say which pending jobs might be given the nodes of a job that is requeued, empty for none.

    Their priority does not matter: the job is held while it moves, and they are not. Of an array
    that runs so many tasks at a time, the next one begins as soon as one is requeued.

    Args:
        job: what Slurm calls the job.
        partition: where it runs.
        waiting: the pending jobs that may run on its nodes, with what each waits for.
    """
    array = job.partition("_")[0]

    def may_start(name: str, why: str) -> bool:
        if why.startswith(_FOR_ITS_ARRAY):
            return name.partition("_")[0] == array
        return not (why.startswith(_NOT_FOR_NODES) or why.endswith(_REQUEUED_AND_HELD))

    # Where tasks of an array wait for different things squeue names all: `JobHeldUser,Resources`.
    rivals = [
        name
        for name, reasons in waiting.items()
        if any(may_start(name, why) for why in reasons.split(","))
    ]
    if not rivals:
        return ""
    named = ", ".join(rivals[:_NAMED])
    more = f" and {len(rivals) - _NAMED} more" if len(rivals) > _NAMED else ""
    who = f"job {named} waits" if len(rivals) == 1 else f"jobs {named}{more} wait"
    return f"{who} for nodes of partition {partition}, and might be given its own meanwhile"


def wait_for_nodes(
    more: int, estimate: Estimate | None, unusable: Mapping[str, str], *, now_s: float
) -> str:
    """Say why a job would have to wait for nodes, empty if it would not.

    Args:
        more: how many nodes it needs beside those that it keeps.
        estimate: when and where those could be had; None where none are needed.
        unusable: of all nodes that it would run on, those that start no job now, with their state.
        now_s: when Slurm was asked.
    """
    nodes = counted(more, "other node")
    if estimate is not None and estimate.preempts:
        return f"it would get {nodes} only by ending other jobs"
    delay_s = 0.0 if estimate is None else estimate.start_s - now_s
    if delay_s > SOON_S:
        return f"it would have to wait for {nodes}{_span(delay_s)}"
    if unusable:
        states = ", ".join(f"{node} is {state}" for node, state in unusable.items())
        return f"it would have to wait for nodes: {states}"
    return ""


def obstacle_to_asking(fields: Mapping[str, str]) -> str:
    """Say why Slurm cannot be asked for some more nodes for a job, empty if it can.

    Args:
        fields: the job's, as `scontrol show job` names them.
    """
    if _OF_ALL_NODES.search(fields.get("Features", "")):
        return f"--constraint={fields['Features']} is about all of its nodes together"
    if fields.get("Contiguous") == "1":
        return "its nodes are to be next to each other (--contiguous)"
    if "ReqSwitch" in fields:
        return "its nodes are to share switches (--switches)"
    return ""


def request(
    fields: Mapping[str, str], has: Sequence[str], placement: Mapping[str, str], *, more: int
) -> list[str]:
    """Return sbatch's options for `more` nodes as good as one that the job has.

    What the job asked for in all is not repeated: what it has on one of its nodes, each further one
    must have too.

    Args:
        fields: the job's, as `scontrol show job` names them.
        has: sbatch's options for what it has on one node.
        placement: sbatch's options for a job that is to start where this one starts.
        more: how many.
    """
    options = [f"--nodes={more}", f"--ntasks={more}", "--ntasks-per-node=1", *has]
    options += [f"--{option}={value}" for option, value in placement.items()]
    for key, option in _FIELDS.items():
        value = fields.get(key, "")
        if value not in {"", "(null)", "0", "N/A"}:
            options.append(f"--{option}={value}")
    if fields.get("OverSubscribe") == "NO":
        options.append("--exclusive")
    return options


def _span(delay_s: float) -> str:
    """Return ` for 50 min`, as far as Slurm can tell: by the time limits of the jobs that run."""
    if delay_s >= _YEAR_S:
        return ", which are in use without an end in sight"
    minutes = max(1, round(delay_s / 60))
    if minutes < 120:
        return f" for up to {minutes} min"
    hours = round(delay_s / 3600)
    return f" for up to {hours} h" if hours < 48 else f" for up to {round(delay_s / 86400)} d"
