# SPDX-License-Identifier: Apache-2.0
"""From a verdict to what is done about it: pure, ordered, with a reason for everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from slurm_health.core.nodeset import fold
from slurm_health.core.records import NodeJudged, VerdictReached
from slurm_health.core.verdict import Level
from slurm_health.errors import ExitCode

REASON_PREFIX = "slurm-health:"
# Slurm's own tools cut longer notes.
REASON_LENGTH = 200


class Disposition(Enum):
    """What becomes of the job."""

    PROCEED = "proceed"
    REQUEUE = "requeue"
    STOP = "stop"


class OnStraggler(Enum):
    """What a slow node causes. It is never drained for being slow."""

    EXCLUDE = "exclude"
    REPORT = "report"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the user and the site allow.

    `max_requeues` bounds how often one job moves away from bad nodes, because Slurm does not
    count requeues. More than `max_bad_share` of a run's nodes at once is not a node problem:
    nobody is drained then. Where `nodes_wanted` is set the job runs on that many of its nodes, and
    gives the others back; it makes do with `nodes_needed` rather than be requeued.
    """

    max_requeues: int = 3
    on_straggler: OnStraggler = OnStraggler.EXCLUDE
    max_bad_share: float = 0.5
    nodes_wanted: int | None = None
    nodes_needed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What the job and its owner can do, as Slurm tells.

    Args:
        job_id: the job.
        batch_node: where its batch script runs; Slurm never lets a job drop that node.
        requeues: how often it was requeued because of a check.
        requeue_obstacle: why it cannot be requeued, empty if it can.
        may_drain: the user is root, SlurmUser or an administrator.
        node_reasons: for nodes that are drained, down or failing already, the note on them.
    """

    job_id: int
    batch_node: str
    requeues: int
    requeue_obstacle: str
    may_drain: bool
    node_reasons: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Take nodes out of the pool, with one note for all of them."""

    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeaveAlone:
    """Do not drain these nodes, and say why."""

    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Shrink:
    """Go on with some of the job's nodes, and give the others back."""

    keep: tuple[str, ...]
    drop: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class RequeueElsewhere:
    """Start the job again on other nodes. Ends the process that performs it, so it comes last."""

    exclude: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Finish:
    """End the check with the job going on here (PROCEED) or not at all (STOP)."""

    disposition: Disposition
    exit_code: ExitCode
    reason: str


Action = Drain | LeaveAlone | Shrink | RequeueElsewhere | Finish


def exit_code(verdict: VerdictReached) -> ExitCode:
    """Return the code a check with this verdict ends with."""
    nodes = {node.level for node in verdict.nodes}
    links = {link.level for link in (*verdict.paths, *verdict.leaves)}
    if (nodes | links) & {Level.FAULTY, Level.SLOW}:
        return ExitCode.BAD_NODES
    # A link that was slow once and could not be tried again leaves every node decided.
    return ExitCode.INCONCLUSIVE if Level.INCONCLUSIVE in nodes else ExitCode.HEALTHY


def unwanted(verdict: VerdictReached, policy: Policy) -> tuple[NodeJudged, ...]:
    """Return the nodes the job should not run on."""
    levels = {Level.FAULTY}
    if policy.on_straggler is OnStraggler.EXCLUDE:
        levels.add(Level.SLOW)
    return tuple(node for node in verdict.nodes if node.level in levels)


def decide(verdict: VerdictReached, policy: Policy, situation: Situation) -> tuple[Action, ...]:
    """Decide what is done about a verdict, in the order in which it must be done.

    Guarantees: only proven faults are drained; every drain comes before the requeue; at most
    one requeue, and it is last; another's note on a node is never touched.
    """
    bad = unwanted(verdict, policy)
    if not bad and not surplus(verdict, policy):
        return (_proceed(verdict),)
    drains = _drains(bad, len(verdict.nodes), policy, situation)
    names = tuple(node.node for node in bad)
    shrink = _shrink(verdict, bad, policy, situation)
    if shrink is not None:
        return (*drains, shrink, _proceed(verdict))
    if not bad:
        return (_proceed(verdict),)
    obstacle = _requeue_obstacle(policy, situation)
    if obstacle:
        again = f"submit the job again with --exclude={fold(names)}"
        reason = f"{fold(names)} cannot be used: {_because(bad)}; {obstacle}; {again}"
        finish = Finish(disposition=Disposition.STOP, exit_code=ExitCode.BAD_NODES, reason=reason)
        return (*drains, finish)
    return (*drains, RequeueElsewhere(exclude=names, reason=_because(bad)))


def surplus(verdict: VerdictReached, policy: Policy) -> bool:
    """Tell whether the job holds more nodes than it is to run on."""
    return policy.nodes_wanted is not None and len(verdict.nodes) > policy.nodes_wanted


def _shrink(
    verdict: VerdictReached, bad: Sequence[NodeJudged], policy: Policy, situation: Situation
) -> Shrink | None:
    """Choose the nodes to go on with, None where there are not enough or it cannot be done."""
    wanted = policy.nodes_wanted
    if wanted is None:
        return None
    names = [node.node for node in verdict.nodes]
    unfit = {node.node for node in bad}
    fit = [node for node in verdict.nodes if node.node not in unfit]
    needed = wanted if policy.nodes_needed is None else policy.nodes_needed
    if len(fit) < needed or situation.batch_node not in {node.node for node in fit}:
        return None
    # The batch node stays whatever comes; then certain before uncertain, fast before slow.
    best = sorted(
        fit,
        key=lambda node: (
            node.node != situation.batch_node,
            node.level is not Level.HEALTHY,
            node.slowdown,
        ),
    )
    kept = {node.node for node in best[:wanted]}
    drop = tuple(name for name in names if name not in kept)
    return Shrink(
        keep=tuple(name for name in names if name in kept),
        drop=drop,
        reason=_because(bad) if bad else "not needed",
    )


def _proceed(verdict: VerdictReached) -> Finish:
    code = exit_code(verdict)
    undecided = [node.node for node in verdict.nodes if node.level is Level.INCONCLUSIVE]
    slow = [node.node for node in verdict.nodes if node.level is Level.SLOW]
    links = [
        "-".join(link.ends)
        for link in (*verdict.paths, *verdict.leaves)
        if link.level is not Level.INCONCLUSIVE
    ]
    said = [f"the connection {link} is bad, no node is to blame" for link in links]
    if slow:
        said.append(f"{fold(slow)} slow, reported only")
    if undecided:
        said.append(f"{fold(undecided)} undecided, going on all the same")
    return Finish(
        disposition=Disposition.PROCEED, exit_code=code, reason="; ".join(said) or "all healthy"
    )


def _drains(
    bad: Sequence[NodeJudged], total: int, policy: Policy, situation: Situation
) -> tuple[Drain | LeaveAlone, ...]:
    faulty = [node for node in bad if node.level is Level.FAULTY]
    if not faulty or not situation.may_drain:
        return ()
    names = tuple(node.node for node in faulty)
    if len(faulty) > max(1, int(policy.max_bad_share * total)):
        reason = f"{len(faulty)} of {total} nodes at once is a fabric or software problem"
        return (LeaveAlone(nodes=names, reason=reason),)
    fresh: dict[str, list[str]] = {}
    actions: list[Drain | LeaveAlone] = []
    for node in faulty:
        note = situation.node_reasons.get(node.node)
        if note is None:
            fresh.setdefault(drain_reason(node, situation.job_id), []).append(node.node)
        else:
            reason = f"already out of the pool: {note or '(no reason given)'}"
            actions.append(LeaveAlone(nodes=(node.node,), reason=reason))
    # One call for all nodes with the same note: each call locks the controller.
    actions += [Drain(nodes=tuple(nodes), reason=note) for note, nodes in fresh.items()]
    return tuple(actions)


def drain_reason(node: NodeJudged, job_id: int) -> str:
    """Return the note for Slurm: ASCII, one line, short, beginning with our prefix."""
    text = f"{REASON_PREFIX} job {job_id}: {node.component}: {node.reason}"
    plain = text.encode("ascii", "replace").decode().replace('"', "'")
    return "".join(char if char.isprintable() else " " for char in plain)[:REASON_LENGTH]


def _requeue_obstacle(policy: Policy, situation: Situation) -> str:
    if situation.requeue_obstacle:
        return situation.requeue_obstacle
    if situation.requeues >= policy.max_requeues:
        return (
            f"already requeued {situation.requeues} times because of bad nodes,"
            f" the limit is {policy.max_requeues} (--max-requeues)"
        )
    return ""


def _because(bad: Sequence[NodeJudged]) -> str:
    return "; ".join(f"{node.node}: {node.reason}" for node in bad)
