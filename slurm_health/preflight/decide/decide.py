# SPDX-License-Identifier: Apache-2.0
"""From a verdict to what is done about it: pure, with a reason for everything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from slurm_health.preflight.decide import decision
from slurm_health.preflight.decide.facts import JobFacts, requeue_obstacle, submit_without
from slurm_health.preflight.decide.paths import (
    PathEnd,
    ends_to_leave,
    in_vain,
    is_of_lone_pair,
    one_of_a_lone_pair,
)
from slurm_health.preflight.decide.policy import AtRequeueLimit, OnInconclusive, OnStraggler, Policy
from slurm_health.records.errors import ExitCode
from slurm_health.records.nodeset import fold
from slurm_health.records.records import Disposition, VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict


def exit_code(verdict: VerdictReached) -> ExitCode:
    """Return the code a check with this verdict ends with."""
    nodes = {node.level for node in verdict.nodes}
    links = {link.level for link in (*verdict.paths, *verdict.leaves)}
    if (nodes | links) & {Level.FAULTY, Level.SLOW}:
        return ExitCode.BAD_NODES
    # A link that was slow once and could not be tried again leaves every node decided.
    return ExitCode.INCONCLUSIVE if Level.INCONCLUSIVE in nodes else ExitCode.HEALTHY


def unwanted(
    verdict: VerdictReached, policy: Policy, *, batch_node: str
) -> tuple[NodeVerdict, ...]:
    """Return the nodes the job should not run on: bad ones and, by the policy, those in doubt.

    Of two nodes with a bad path between them it is one, as a `PathEnd`; of two that are all that a
    job has and cannot exchange data too, though nothing tells which of them is at fault.
    """
    levels = {Level.FAULTY}
    if policy.on_straggler is not OnStraggler.REPORT:
        levels.add(Level.SLOW)
    if policy.on_inconclusive is not OnInconclusive.PROCEED:
        levels.add(Level.INCONCLUSIVE)
    judged = tuple(node for node in verdict.nodes if node.level in levels)
    slow = policy.on_straggler is not OnStraggler.REPORT
    left = _names(judged)
    ends = ends_to_leave(verdict, left=left, batch_node=batch_node, slow=slow)
    return (*judged, *ends, *(() if left else one_of_a_lone_pair(verdict, batch_node=batch_node)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that a decision rests on; `unwanted` are the nodes that the job should not run on."""

    verdict: VerdictReached
    unwanted: tuple[NodeVerdict, ...]
    policy: Policy
    facts: JobFacts

    @classmethod
    def of(cls, verdict: VerdictReached, policy: Policy, facts: JobFacts) -> Case:
        """Return the case of a job with this verdict."""
        avoid = unwanted(verdict, policy, batch_node=facts.batch_node)
        return cls(verdict=verdict, unwanted=avoid, policy=policy, facts=facts)

    def waiting(self, why: str) -> Case:
        """Return it for a job that would have to wait for other nodes; empty: it would not."""
        return replace(self, facts=replace(self.facts, wait=why))

    def keeping_all(self, why: str) -> Case:
        """Return it for a job that cannot give nodes back."""
        return replace(self, facts=replace(self.facts, give_back_obstacle=why))

    @property
    def avoided(self) -> tuple[NodeVerdict, ...]:
        """The nodes it is to run without: not those in doubt for which a person has released it."""
        return tuple(
            node
            for node in self.unwanted
            if node.level is not Level.INCONCLUSIVE or node.node not in self.facts.held_for
        )

    @property
    def waits(self) -> bool:
        """Whether the job is to leave slow nodes however long it waits for others."""
        return self.policy.on_straggler in {OnStraggler.REQUEUE, OnStraggler.DRAIN}

    @property
    def keeps_size(self) -> bool:
        """Whether it leaves slow nodes rather than go on with fewer."""
        return self.policy.on_straggler is OnStraggler.REQUEUE

    @property
    def held_back(self) -> tuple[NodeVerdict, ...]:
        """The nodes for which the job is held rather than requeued."""
        hold = self.policy.on_inconclusive is OnInconclusive.HOLD
        return tuple(node for node in self.avoided if hold and node.level is Level.INCONCLUSIVE)

    @property
    def wanted(self) -> tuple[NodeVerdict, ...]:
        """The nodes that the job is to leave if it can."""
        return tuple(node for node in self.avoided if node not in self.held_back)

    @property
    def must(self) -> tuple[NodeVerdict, ...]:
        """Those that it is to leave however long it waits for others."""
        return tuple(
            node
            for node in self.wanted
            if (self.waits or node.level is not Level.SLOW) and not is_of_lone_pair(node)
        )

    def released(self, nodes: Sequence[NodeVerdict]) -> bool:
        """Whether a person has released the job after it was held for each of these nodes."""
        return bool(nodes) and self.facts.held_for.issuperset(_names(nodes))


def decide(case: Case) -> decision.Decision:
    """Decide what is done about a verdict.

    Guarantees: only proven faults of nodes, and on request proven slowness, are to be drained; a
    job that is made smaller goes on; neither slowness, nor doubt, nor a bad path ends a job, unless
    it was to be held for doubt and cannot be; a job leaves what is slow only for nodes that it has,
    or can have at once, unless it was asked to wait; so it leaves one of two nodes that cannot
    exchange data, and that twice at most, since a third pair says that no node is the reason.
    """
    shrink, ending = _chosen(case)
    return decision.Decision(drains=_drains(case), shrink=shrink, ending=ending)


def question(case: Case) -> decision.StartQuestion | None:
    """Return what Slurm is to be asked first; None where its answer would change nothing."""
    left = case.wanted
    if not _only_at_once(case, left) or _best_shrink(case, left) is not None:
        return None
    facts, policy, nodes = case.facts, case.policy, case.verdict.nodes
    if requeue_obstacle(facts, _names(left)) or _at_limit(case) or in_vain(left, facts.requeues):
        return None
    keep = tuple(node.node for node in nodes if node.node not in _names(left))
    full = len(nodes) if policy.nodes_wanted is None else policy.nodes_wanted
    needed = full if policy.nodes_needed is None else policy.nodes_needed
    slow_first = sorted(left, key=lambda node: node.level is not Level.SLOW)
    return decision.StartQuestion(
        leave=_names(slow_first), keep=keep, more=max(0, needed - len(keep))
    )


def decide_unasked(
    verdict: VerdictReached, unwanted: Sequence[NodeVerdict], policy: Policy, problem: str
) -> decision.Ending:
    """Decide what becomes of a job with unwanted nodes when Slurm does not answer."""
    why = f"{_because(unwanted)}; could not query Slurm: {problem}"
    doubt = any(node.level is Level.INCONCLUSIVE for node in unwanted)
    if _faulty(unwanted) or (doubt and policy.on_inconclusive is OnInconclusive.HOLD):
        return _end(Disposition.STOP, verdict, f"{why}; submit the job again")
    return _end(Disposition.PROCEED, verdict, f"{why}; continuing anyway{_cost(unwanted)}")


def _drains(case: Case) -> tuple[decision.Drain | decision.LeaveAlone, ...]:
    if not case.facts.may_drain:
        return ()
    wanted = decision.drains(
        [
            node
            for node in case.avoided
            if node.level is not Level.INCONCLUSIVE and not isinstance(node, PathEnd)
        ],
        total=len(case.verdict.nodes),
        drain_slow=case.policy.on_straggler is OnStraggler.DRAIN,
        max_bad_share=case.policy.max_bad_share,
    )
    return tuple(
        each
        for each in wanted
        if isinstance(each, decision.LeaveAlone) or each.node not in case.facts.drained
    )


def _chosen(case: Case) -> tuple[decision.Shrink | None, decision.Ending]:
    """Choose the first way that is open, from the one that avoids most to the one that must be.

    On each, a job that can run on some of its nodes does so rather than go back into the queue.
    """
    faulty = tuple(node for node in case.wanted if node.level is Level.FAULTY)
    for left in filter(None, dict.fromkeys((case.wanted, case.must, faulty))):
        smaller = _best_shrink(case, left)
        if smaller is None and not _obstacle(case, left):
            return None, _requeue(case, left)
        smaller = smaller or _shrink(case, left, case.policy.nodes_needed)
        if smaller is not None:
            return smaller, _proceed(case)
    return _no_way_out(case)


def _obstacle(case: Case, left: Sequence[NodeVerdict]) -> str:
    """Say why the job is not to be requeued without these nodes, empty if it may be."""
    obstacle = (
        requeue_obstacle(case.facts, _names(left))
        or _at_limit(case)
        or in_vain(left, case.facts.requeues)
    )
    return obstacle or (case.facts.wait if _only_at_once(case, left) else "")


def _only_at_once(case: Case, left: Sequence[NodeVerdict]) -> bool:
    """Tell whether these nodes are left only for others that the job can have at once."""
    return any(map(is_of_lone_pair, left)) or (_slow(left) and not case.waits)


def _at_limit(case: Case) -> str:
    """Say that the job was requeued as often as it may be, empty if it was not."""
    if case.facts.requeues < case.policy.max_requeues:
        return ""
    return (
        f"already requeued {case.facts.requeues} times because of bad nodes,"
        f" the limit is {case.policy.max_requeues} (--max-requeues)"
    )


def _best_shrink(case: Case, left: Sequence[NodeVerdict]) -> decision.Shrink | None:
    """Go on without these nodes and with as many as the job is to keep; None where it cannot."""
    policy = case.policy
    keep_size = _slow(left) and case.keeps_size
    return _shrink(case, left, policy.nodes_wanted if keep_size else policy.nodes_needed)


def _shrink(case: Case, left: Sequence[NodeVerdict], least: int | None) -> decision.Shrink | None:
    """Choose nodes to give back; None where there are none, too few are left, or it cannot be."""
    policy, batch_node = case.policy, case.facts.batch_node
    wanted = policy.nodes_wanted
    unfit = {node.node for node in (*left, *case.held_back)}
    fit = [node for node in case.verdict.nodes if node.node not in unfit]
    if wanted is None or len(fit) < (wanted if least is None else least):
        return None
    # The batch node stays whatever comes; then certain before uncertain, fast before slow.
    best = sorted(
        fit,
        key=lambda node: (
            node.node != batch_node,
            node.level is not Level.HEALTHY,
            node.level is Level.FAULTY,
            node.node in policy.last_choice,
            node.slowdown,
        ),
    )
    kept = {node.node for node in best[:wanted]}
    names = [node.node for node in case.verdict.nodes]
    well = {node.node for node in fit if node.level is Level.HEALTHY}
    spares = tuple(n for n in names if policy.keep_spares and n in well and n not in kept)
    drop = tuple(name for name in names if name not in kept and name not in spares)
    if not (drop or spares) or batch_node not in kept:
        return None
    if drop and case.facts.give_back_obstacle:
        return None
    staying = [node for node in case.avoided if node.node in kept]
    reasons = [_because(node for node in case.avoided if node.node not in kept) or "not needed"]
    reasons += [_running_on(case, staying)] if staying else []
    keep = tuple(name for name in names if name in kept)
    return decision.Shrink(keep=keep, drop=drop, spares=spares, reason="; ".join(reasons))


def _requeue(case: Case, left: Sequence[NodeVerdict]) -> decision.Ending:
    bad = any(node.level is not Level.INCONCLUSIVE for node in left)
    return decision.Ending(
        disposition=Disposition.REQUEUE,
        exit_code=ExitCode.BAD_NODES if bad else ExitCode.INCONCLUSIVE,
        reason=_because(left),
        nodes=_names(left),
        may_stay=not _faulty(left) or case.released(left),
        keep_size=_slow(left) and case.keeps_size,
    )


def _no_way_out(case: Case) -> tuple[decision.Shrink | None, decision.Ending]:
    """Decide for a job that has no node to leave, or cannot leave those that it should."""
    smaller = _shrink(case, (), case.policy.nodes_needed)
    if not case.must and (smaller is not None or not case.avoided):
        return smaller, _proceed(case)
    faulty, released = _faulty(case.must), case.released(case.must)
    if case.held_back and (released or not faulty):
        return None, _hold_for_doubt(case)
    obstacle = requeue_obstacle(case.facts, _names(case.must))
    if released:
        held = f"it was held for {fold(_names(case.must))}, and a person released it"
        return _start_anyway(case, f"{obstacle or _at_limit(case)}; starting anyway: {held}")
    at_limit = case.policy.at_requeue_limit
    only_limit = bool(case.must) and not obstacle  # keeps it from being requeued
    if only_limit and at_limit is AtRequeueLimit.HOLD:
        return None, _hold(case, (*case.must, *case.held_back), _at_limit(case))
    by_name = not case.facts.named.isdisjoint(_names(case.must))
    if (only_limit or by_name) and at_limit is AtRequeueLimit.START:
        how = "starting anyway (--at-requeue-limit=start)"
        return _start_anyway(case, f"{obstacle or _at_limit(case)}; {how}")
    if faulty:
        return None, _stop(case, case.must, obstacle or _at_limit(case))
    ending = _end(Disposition.PROCEED, case.verdict, _running_on(case, case.avoided))
    return smaller, replace(ending, may_stay=True)


def _start_anyway(case: Case, why: str) -> tuple[decision.Shrink | None, decision.Ending]:
    """Run on bad nodes as the user asked, on the best of all if there are more than needed."""
    ending = _end(Disposition.PROCEED, case.verdict, f"{_because(case.avoided)}; {why}")
    shrink = _shrink(replace(case, unwanted=()), (), None)
    if shrink is not None:
        shrink = replace(shrink, reason=ending.reason)
    return shrink, replace(ending, may_stay=True)


def _stop(case: Case, nodes: Sequence[NodeVerdict], why: str) -> decision.Ending:
    """End a job that can neither leave faulty nodes nor run on them."""
    reasons = [f"{fold(_names(nodes))} cannot be used: {_because(nodes)}"]
    if case.facts.give_back_obstacle:
        reasons.append(f"could not give nodes back: {case.facts.give_back_obstacle}")
    without = {*_names(nodes), *case.facts.left_behind}
    reasons += [why, submit_without(without, case.facts)]
    return _end(Disposition.STOP, case.verdict, "; ".join(reasons))


def _hold(case: Case, nodes: Sequence[NodeVerdict], why: str) -> decision.Ending:
    return decision.Ending(
        disposition=Disposition.HOLD,
        exit_code=exit_code(case.verdict),
        reason=f"{_because(nodes)}; {why}",
        nodes=_names(nodes),
    )


def _hold_for_doubt(case: Case) -> decision.Ending:
    why = "undecided nodes are not used (--on-inconclusive=hold)"
    if not case.facts.hold_obstacle:
        return _hold(case, case.held_back, why)
    return _stop(
        case, case.held_back, f"{why}; it cannot be held either: {case.facts.hold_obstacle}"
    )


def _running_on(case: Case, nodes: Sequence[NodeVerdict]) -> str:
    """Say why the job runs on nodes that it would rather leave, and what that may cost."""
    why = _obstacle(case, case.wanted)
    reasons = [_because(nodes), why, f"continuing with {fold(_names(nodes))} anyway{_cost(nodes)}"]
    return "; ".join(filter(None, reasons))


def _proceed(case: Case) -> decision.Ending:
    verdict = case.verdict
    undecided = [node.node for node in verdict.nodes if node.level is Level.INCONCLUSIVE]
    slow = [node for node in verdict.nodes if node.level is Level.SLOW and node not in case.avoided]
    reasons = [
        f"the connection {'-'.join(link.ends)} is bad, no node is to blame"
        f"{_at_worst(link.slowdown, 'network')}"
        for link in (*verdict.paths, *verdict.leaves)
        if link.level is not Level.INCONCLUSIVE and not {*link.ends} & {*_names(case.avoided)}
    ]
    if slow:
        reasons.append(f"{fold(_names(slow))} slow, reported only{_cost(slow)}")
    if undecided:
        reasons.append(f"{fold(undecided)} undecided, continuing anyway")
    ending = _end(Disposition.PROCEED, verdict, "; ".join(reasons) or "all healthy")
    return replace(ending, may_stay=not _faulty(case.avoided))


def _end(disposition: Disposition, verdict: VerdictReached, reason: str) -> decision.Ending:
    return decision.Ending(disposition=disposition, exit_code=exit_code(verdict), reason=reason)


def _faulty(nodes: Iterable[NodeVerdict]) -> bool:
    return any(node.level is Level.FAULTY for node in nodes)


def _slow(nodes: Iterable[NodeVerdict]) -> bool:
    return any(node.level is Level.SLOW for node in nodes)


def _names(nodes: Iterable[NodeVerdict]) -> tuple[str, ...]:
    return tuple(node.node for node in nodes)


def _because(nodes: Iterable[NodeVerdict]) -> str:
    return "; ".join(f"{node.node}: {node.reason}" for node in nodes)


def _cost(nodes: Iterable[NodeVerdict]) -> str:
    """Return `: each step may take up to 2.1 times as long (network)`; empty without slow nodes.

    A step waits for its slowest node, and takes as much longer only if it is all of what is slow.
    """
    slow = [node for node in nodes if node.level is Level.SLOW]
    worst = max(slow, key=lambda node: node.slowdown, default=None)
    return "" if worst is None else _at_worst(worst.slowdown, worst.component)


def _at_worst(slowdown: float, part: str) -> str:
    if slowdown <= 1:
        return ""
    times = f"{slowdown:.{2 if slowdown < 2 else 1}f}"
    return f": each step may take up to {times} times as long ({part})"
