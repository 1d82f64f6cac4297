# SPDX-License-Identifier: Apache-2.0
"""From a verdict to what is done about it: pure, ordered, with a reason for everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from slurm_health.core.acting.drains import Drain, LeaveAlone, drains
from slurm_health.core.nodeset import fold
from slurm_health.core.records import VerdictReached
from slurm_health.core.verdict import Level, NodeVerdict
from slurm_health.errors import ExitCode


class Disposition(Enum):
    """What becomes of the job."""

    PROCEED = "proceed"
    REQUEUE = "requeue"
    HOLD = "hold"
    STOP = "stop"


class OnStraggler(Enum):
    """What a slow node causes."""

    EXCLUDE = "exclude"  # the job runs without it: on a spare, on fewer nodes, or elsewhere
    REPORT = "report"  # the job runs with it
    REQUEUE = "requeue"  # as EXCLUDE, but elsewhere rather than on fewer nodes
    DRAIN = "drain"  # as EXCLUDE, and where the slowness is proven the node leaves the pool


class OnInconclusive(Enum):
    """What a node causes that could not be decided. It is never drained for that."""

    PROCEED = "proceed"
    HOLD = "hold"  # a person decides
    REQUEUE = "requeue"  # the job runs without it, as without a bad one


class AtRequeueLimit(Enum):
    """What becomes of a job on bad nodes that was requeued as often as it may be."""

    START = "start"
    HOLD = "hold"
    STOP = "stop"


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
    on_inconclusive: OnInconclusive = OnInconclusive.PROCEED
    at_requeue_limit: AtRequeueLimit = AtRequeueLimit.STOP
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
        requeue_obstacle: why it cannot be requeued without its bad nodes, empty if it can.
        may_drain: the user is root, SlurmUser or an administrator.
        node_reasons: for nodes that are drained, down or failing already, the note on them.
        hold_obstacle: why it cannot even be requeued and held, empty if it can.
        held_for: nodes that it was held for before. A person has released it since, and that is
            the answer about those nodes.
    """

    job_id: int
    batch_node: str
    requeues: int
    requeue_obstacle: str
    may_drain: bool
    node_reasons: Mapping[str, str]
    hold_obstacle: str = ""
    held_for: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Shrink:
    """Go on with some of the job's nodes, and give the others back."""

    keep: tuple[str, ...]
    drop: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class RequeueElsewhere:
    """Start the job again on other nodes. Ends the process that performs it, so it comes last.

    Where that is not `needed`, because the nodes are only in doubt, a job that cannot move stays.
    `least` is with how few nodes it makes do, None if it needs all that it asks for.
    """

    exclude: tuple[str, ...]
    reason: str
    needed: bool = True
    least: int | None = None


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Put the job back into the queue until a person releases it. Comes last, as a requeue."""

    nodes: tuple[str, ...]
    exit_code: ExitCode
    reason: str


@dataclass(frozen=True, kw_only=True)
class Finish:
    """End the check with the job going on here (PROCEED) or not at all (STOP)."""

    disposition: Disposition
    exit_code: ExitCode
    reason: str


Action = Drain | LeaveAlone | Shrink | RequeueElsewhere | Hold | Finish


def exit_code(verdict: VerdictReached) -> ExitCode:
    """Return the code a check with this verdict ends with."""
    nodes = {node.level for node in verdict.nodes}
    links = {link.level for link in (*verdict.paths, *verdict.leaves)}
    if (nodes | links) & {Level.FAULTY, Level.SLOW}:
        return ExitCode.BAD_NODES
    # A link that was slow once and could not be tried again leaves every node decided.
    return ExitCode.INCONCLUSIVE if Level.INCONCLUSIVE in nodes else ExitCode.HEALTHY


def unwanted(verdict: VerdictReached, policy: Policy) -> tuple[NodeVerdict, ...]:
    """Return the nodes the job should not run on, bad or, by the policy, in doubt."""
    levels = {Level.FAULTY}
    if policy.on_straggler is not OnStraggler.REPORT:
        levels.add(Level.SLOW)
    if policy.on_inconclusive is not OnInconclusive.PROCEED:
        levels.add(Level.INCONCLUSIVE)
    return tuple(node for node in verdict.nodes if node.level in levels)


def decide(verdict: VerdictReached, policy: Policy, situation: Situation) -> tuple[Action, ...]:
    """Decide what is done about a verdict, in the order in which it must be done.

    Guarantees: only proven faults, and on request proven slowness, are drained; every drain comes
    before the requeue; at most one requeue or hold, and it is last; another's note on a node is
    never touched; doubt alone never ends a job that could be held.
    """
    avoided = tuple(
        node
        for node in unwanted(verdict, policy)
        if node.level is not Level.INCONCLUSIVE or node.node not in situation.held_for
    )
    if not avoided and not surplus(verdict, policy):
        return (_proceed(verdict),)
    draining = _drains(avoided, len(verdict.nodes), policy, situation)
    shrink = _shrink(verdict, avoided, situation, policy.nodes_wanted, _least(avoided, policy))
    if shrink is not None:
        return (*draining, shrink, _proceed(verdict))
    if not avoided:
        return (_proceed(verdict),)
    return (*draining, *_leave(verdict, avoided, policy, situation))


def decide_unasked(verdict: VerdictReached, policy: Policy, problem: str) -> Finish:
    """Decide what becomes of a job with unwanted nodes when Slurm cannot be asked or told."""
    nodes = unwanted(verdict, policy)
    said = f"{_because(nodes)}; Slurm cannot be asked what to do about it: {problem}"
    wait = policy.on_inconclusive is OnInconclusive.HOLD
    if _bad(nodes) or wait:
        return _finish(Disposition.STOP, verdict, f"{said}; submit the job again")
    return _finish(Disposition.PROCEED, verdict, f"{said}; going on all the same")


def surplus(verdict: VerdictReached, policy: Policy) -> bool:
    """Tell whether the job holds more nodes than it is to run on."""
    return policy.nodes_wanted is not None and len(verdict.nodes) > policy.nodes_wanted


def _leave(
    verdict: VerdictReached,
    avoided: Sequence[NodeVerdict],
    policy: Policy,
    situation: Situation,
) -> tuple[Action, ...]:
    """Decide for a job that cannot just go on without the nodes it should avoid."""
    bad = _bad(avoided)
    if not bad and policy.on_inconclusive is OnInconclusive.HOLD:
        return (_hold(verdict, avoided, situation, "not to be run on (--on-inconclusive=hold)"),)
    left = avoided if policy.on_inconclusive is OnInconclusive.REQUEUE else bad
    at_limit = situation.requeues >= policy.max_requeues
    if not situation.requeue_obstacle and not at_limit:
        names = tuple(node.node for node in left)
        move = RequeueElsewhere(
            exclude=names, reason=_because(left), needed=bool(bad), least=policy.nodes_needed
        )
        return (move,)
    smaller = _shrink(verdict, avoided, situation, policy.nodes_wanted, policy.nodes_needed)
    if smaller is not None:
        return (smaller, _proceed(verdict))
    if situation.requeue_obstacle:
        return (_stay(verdict, left, situation.requeue_obstacle),)
    limit = (
        f"already requeued {situation.requeues} times because of bad nodes,"
        f" the limit is {policy.max_requeues} (--max-requeues)"
    )
    match policy.at_requeue_limit:
        case AtRequeueLimit.HOLD:
            return (_hold(verdict, left, situation, limit),)
        case AtRequeueLimit.START:
            reason = f"{_because(left)}; {limit}; starting all the same (--at-requeue-limit)"
            return (_finish(Disposition.PROCEED, verdict, reason),)
        case AtRequeueLimit.STOP:
            return (_stay(verdict, left, limit),)


def _stay(verdict: VerdictReached, left: Sequence[NodeVerdict], obstacle: str) -> Finish:
    """End a job that cannot move away from bad nodes; doubt alone does not end it."""
    names = fold(node.node for node in left)
    if not _bad(left):
        reason = f"{_because(left)}; {obstacle}; going on with {names} all the same"
        return _finish(Disposition.PROCEED, verdict, reason)
    again = f"submit the job again with --exclude={names}"
    reason = f"{names} cannot be used: {_because(left)}; {obstacle}; {again}"
    return _finish(Disposition.STOP, verdict, reason)


def _hold(
    verdict: VerdictReached, nodes: Sequence[NodeVerdict], situation: Situation, why: str
) -> Hold | Finish:
    names = tuple(node.node for node in nodes)
    reason = f"{_because(nodes)}; {why}"
    if not situation.hold_obstacle:
        return Hold(nodes=names, exit_code=exit_code(verdict), reason=reason)
    again = f"submit the job again with --exclude={fold(names)}"
    reason = f"{reason}; it cannot be held either: {situation.hold_obstacle}; {again}"
    return _finish(Disposition.STOP, verdict, reason)


def _least(avoided: Sequence[NodeVerdict], policy: Policy) -> int | None:
    """Return with how few nodes the job goes on rather than leave; None: all that it wants."""
    slow = any(node.level is Level.SLOW for node in avoided)
    keep_size = slow and policy.on_straggler is OnStraggler.REQUEUE
    return policy.nodes_wanted if keep_size else policy.nodes_needed


def _shrink(
    verdict: VerdictReached,
    avoided: Sequence[NodeVerdict],
    situation: Situation,
    wanted: int | None,
    least: int | None,
) -> Shrink | None:
    """Choose the nodes to go on with, None where there are not enough or it cannot be done."""
    if wanted is None:
        return None
    names = [node.node for node in verdict.nodes]
    unfit = {node.node for node in avoided}
    fit = [node for node in verdict.nodes if node.node not in unfit]
    needed = wanted if least is None else least
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
        reason=_because(avoided) if avoided else "not needed",
    )


def _proceed(verdict: VerdictReached) -> Finish:
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
    return _finish(Disposition.PROCEED, verdict, "; ".join(said) or "all healthy")


def _drains(
    avoided: Sequence[NodeVerdict], total: int, policy: Policy, situation: Situation
) -> tuple[Drain | LeaveAlone, ...]:
    if not situation.may_drain:
        return ()
    return drains(
        _bad(avoided),
        total=total,
        job_id=situation.job_id,
        drain_slow=policy.on_straggler is OnStraggler.DRAIN,
        max_bad_share=policy.max_bad_share,
        node_reasons=situation.node_reasons,
    )


def _bad(nodes: Sequence[NodeVerdict]) -> tuple[NodeVerdict, ...]:
    return tuple(node for node in nodes if node.level is not Level.INCONCLUSIVE)


def _finish(disposition: Disposition, verdict: VerdictReached, reason: str) -> Finish:
    return Finish(disposition=disposition, exit_code=exit_code(verdict), reason=reason)


def _because(nodes: Sequence[NodeVerdict]) -> str:
    return "; ".join(f"{node.node}: {node.reason}" for node in nodes)
