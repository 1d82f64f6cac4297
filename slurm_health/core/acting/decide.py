# SPDX-License-Identifier: Apache-2.0
"""From a verdict to what is done about it: pure, with a reason for everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_health.core.acting.drains import Drain, LeaveAlone, drains
from slurm_health.core.acting.policy import AtRequeueLimit, OnInconclusive, OnStraggler, Policy
from slurm_health.core.nodeset import fold
from slurm_health.core.records import Disposition, VerdictReached
from slurm_health.core.verdict import Level, NodeVerdict
from slurm_health.errors import ExitCode


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What the job and its owner can do, as Slurm and the journals of the job tell.

    Args:
        job_id: the job.
        batch_node: where its batch script runs; Slurm never lets a job drop that node.
        requeues: how often it was requeued because of a check.
        requeue_obstacle: why it cannot be requeued without its bad nodes, empty if it can.
        hold_obstacle: why it cannot even be requeued and held, empty if it can.
        held_for: nodes that it was held for before. A person has released it since, and that is
            the answer about those nodes.
        may_drain: the user is root, SlurmUser or an administrator.
        drained: nodes that this run has drained, before its master was replaced.
        excluded: nodes that it excludes already.
        placement: sbatch's options for a job that is to start where this one starts.
    """

    job_id: int
    batch_node: str
    requeues: int = 0
    requeue_obstacle: str = ""
    hold_obstacle: str = ""
    held_for: frozenset[str] = frozenset()
    may_drain: bool = False
    drained: frozenset[str] = frozenset()
    excluded: tuple[str, ...] = ()
    placement: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Shrink:
    """Go on with some of the job's nodes, and give the others back."""

    keep: tuple[str, ...]
    drop: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What becomes of the job, and the code the check ends with.

    PROCEED and STOP end the check; REQUEUE starts the job again without `nodes`, and HOLD leaves it
    in the queue because of them, until a person releases it. With `may_stay` the job is to avoid no
    faulty node, only slow or undecided ones: it stays where it cannot leave them.
    """

    disposition: Disposition
    exit_code: ExitCode
    reason: str
    nodes: tuple[str, ...] = ()
    may_stay: bool = False


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is done about a verdict.

    Nodes are drained first, then the job is made smaller. The ending comes last: a requeue or a
    hold ends the process that performs it.
    """

    drains: tuple[Drain | LeaveAlone, ...] = ()
    shrink: Shrink | None = None
    ending: Ending


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


def decide(
    verdict: VerdictReached, unwanted: Sequence[NodeVerdict], policy: Policy, facts: JobFacts
) -> Decision:
    """Decide what is done about a verdict with these unwanted nodes.

    Guarantees: only proven faults, and on request proven slowness, are to be drained; a job that is
    made smaller goes on; neither slowness nor doubt ends a job, unless it was to be held for doubt
    and cannot be.
    """
    avoided = tuple(
        node
        for node in unwanted
        if node.level is not Level.INCONCLUSIVE or node.node not in facts.held_for
    )
    case = _Case(verdict=verdict, avoided=avoided, policy=policy, facts=facts)
    shrink = _shrink(case, _least(case))
    if shrink is None and avoided:
        shrink, ending = _leave(case)
    else:
        ending = _proceed(case)
    return Decision(drains=_drains(case), shrink=shrink, ending=ending)


def decide_unasked(
    verdict: VerdictReached, unwanted: Sequence[NodeVerdict], policy: Policy, problem: str
) -> Ending:
    """Decide what becomes of a job with unwanted nodes when Slurm does not answer."""
    said = f"{_because(unwanted)}; could not query Slurm: {problem}"
    doubt = any(node.level is Level.INCONCLUSIVE for node in unwanted)
    if _faulty(unwanted) or (doubt and policy.on_inconclusive is OnInconclusive.HOLD):
        return _end(Disposition.STOP, verdict, f"{said}; submit the job again")
    return _end(Disposition.PROCEED, verdict, f"{said}; continuing anyway")


@dataclass(frozen=True, kw_only=True)
class _Case:
    """All that a decision rests on; `avoided` are the nodes that the job is to run without."""

    verdict: VerdictReached
    avoided: tuple[NodeVerdict, ...]
    policy: Policy
    facts: JobFacts


def _drains(case: _Case) -> tuple[Drain | LeaveAlone, ...]:
    if not case.facts.may_drain:
        return ()
    wanted = drains(
        _bad(case.avoided),
        total=len(case.verdict.nodes),
        drain_slow=case.policy.on_straggler is OnStraggler.DRAIN,
        max_bad_share=case.policy.max_bad_share,
    )
    return tuple(
        each
        for each in wanted
        if isinstance(each, LeaveAlone) or each.node not in case.facts.drained
    )


def _least(case: _Case) -> int | None:
    """Return with how few nodes the job goes on rather than leave; None: all that it wants."""
    slow = any(node.level is Level.SLOW for node in case.avoided)
    keep_size = slow and case.policy.on_straggler is OnStraggler.REQUEUE
    return case.policy.nodes_wanted if keep_size else case.policy.nodes_needed


def _shrink(case: _Case, least: int | None) -> Shrink | None:
    """Choose nodes to give back; None where there are none, too few are left, or it cannot be."""
    wanted, batch_node = case.policy.nodes_wanted, case.facts.batch_node
    unfit = {node.node for node in case.avoided}
    fit = [node for node in case.verdict.nodes if node.node not in unfit]
    if wanted is None or len(fit) < (wanted if least is None else least):
        return None
    # The batch node stays whatever comes; then certain before uncertain, fast before slow.
    best = sorted(
        fit,
        key=lambda node: (
            node.node != batch_node,
            node.level is not Level.HEALTHY,
            node.slowdown,
        ),
    )
    kept = {node.node for node in best[:wanted]}
    names = [node.node for node in case.verdict.nodes]
    drop = tuple(name for name in names if name not in kept)
    if not drop or batch_node not in kept:
        return None
    return Shrink(
        keep=tuple(name for name in names if name in kept),
        drop=drop,
        reason=_because(case.avoided) or "not needed",
    )


def _leave(case: _Case) -> tuple[Shrink | None, Ending]:
    """Decide for a job that would leave the nodes it should avoid rather than go on with fewer."""
    policy, facts = case.policy, case.facts
    bad = _bad(case.avoided)
    if not bad and policy.on_inconclusive is OnInconclusive.HOLD:
        why = "undecided nodes are not used (--on-inconclusive=hold)"
        return None, _hold(case, case.avoided, why)
    left = case.avoided if policy.on_inconclusive is OnInconclusive.REQUEUE else bad
    at_limit = facts.requeues >= policy.max_requeues
    if not facts.requeue_obstacle and not at_limit:
        return None, Ending(
            disposition=Disposition.REQUEUE,
            exit_code=ExitCode.BAD_NODES if bad else ExitCode.INCONCLUSIVE,
            reason=_because(left),
            nodes=_names(left),
            may_stay=not _faulty(left),
        )
    smaller = _shrink(case, policy.nodes_needed)
    if smaller is not None:
        return smaller, _proceed(case)
    if facts.requeue_obstacle:
        return None, _stay(case, left, facts.requeue_obstacle)
    return None, _at_limit(case, left)


def _at_limit(case: _Case, left: Sequence[NodeVerdict]) -> Ending:
    """Decide for a job that was requeued as often as it may be."""
    limit = (
        f"already requeued {case.facts.requeues} times because of bad nodes,"
        f" the limit is {case.policy.max_requeues} (--max-requeues)"
    )
    match case.policy.at_requeue_limit:
        case AtRequeueLimit.HOLD:
            return _hold(case, left, limit)
        case AtRequeueLimit.START:
            reason = f"{_because(left)}; {limit}; starting anyway (--at-requeue-limit=start)"
            return _end(Disposition.PROCEED, case.verdict, reason)
        case AtRequeueLimit.STOP:
            return _stay(case, left, limit)


def _stay(case: _Case, left: Sequence[NodeVerdict], obstacle: str) -> Ending:
    """End a job that cannot move away from faulty nodes; slowness and doubt do not end it."""
    names = fold(_names(left))
    if not _faulty(left):
        reason = f"{_because(left)}; {obstacle}; continuing with {names} anyway"
        return _end(Disposition.PROCEED, case.verdict, reason)
    reason = f"{names} cannot be used: {_because(left)}; {obstacle}; {_submit_without(left)}"
    return _end(Disposition.STOP, case.verdict, reason)


def _hold(case: _Case, nodes: Sequence[NodeVerdict], why: str) -> Ending:
    reason = f"{_because(nodes)}; {why}"
    if not case.facts.hold_obstacle:
        return Ending(
            disposition=Disposition.HOLD,
            exit_code=exit_code(case.verdict),
            reason=reason,
            nodes=_names(nodes),
        )
    obstacle = f"it cannot be held either: {case.facts.hold_obstacle}"
    if all(node.level is Level.SLOW for node in nodes):
        return _stay(case, nodes, f"{why}; {obstacle}")
    reason = f"{reason}; {obstacle}; {_submit_without(nodes)}"
    return _end(Disposition.STOP, case.verdict, reason)


def _proceed(case: _Case) -> Ending:
    verdict = case.verdict
    undecided = [node.node for node in verdict.nodes if node.level is Level.INCONCLUSIVE]
    slow = [node.node for node in verdict.nodes if node.level is Level.SLOW]
    said = [
        f"the connection {'-'.join(link.ends)} is bad, no node is to blame"
        for link in (*verdict.paths, *verdict.leaves)
        if link.level is not Level.INCONCLUSIVE
    ]
    if slow:
        said.append(f"{fold(slow)} slow, reported only")
    if undecided:
        said.append(f"{fold(undecided)} undecided, continuing anyway")
    ending = _end(Disposition.PROCEED, verdict, "; ".join(said) or "all healthy")
    return replace(ending, may_stay=not _faulty(case.avoided))


def _end(disposition: Disposition, verdict: VerdictReached, reason: str) -> Ending:
    return Ending(disposition=disposition, exit_code=exit_code(verdict), reason=reason)


def _bad(nodes: Sequence[NodeVerdict]) -> tuple[NodeVerdict, ...]:
    return tuple(node for node in nodes if node.level is not Level.INCONCLUSIVE)


def _faulty(nodes: Sequence[NodeVerdict]) -> bool:
    return any(node.level is Level.FAULTY for node in nodes)


def _names(nodes: Sequence[NodeVerdict]) -> tuple[str, ...]:
    return tuple(node.node for node in nodes)


def _because(nodes: Sequence[NodeVerdict]) -> str:
    return "; ".join(f"{node.node}: {node.reason}" for node in nodes)


def _submit_without(nodes: Sequence[NodeVerdict]) -> str:
    return f"submit the job again with --exclude={fold(_names(nodes))}"
