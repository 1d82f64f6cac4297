# SPDX-License-Identifier: Apache-2.0
"""From a verdict to what is done about it: pure, with a reason for everything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurm_health.preflight.decide.facts import (
    JobFacts,
    requeue_obstacle,
    submit_without,
    wait_obstacle,
)
from slurm_health.preflight.decide.paths import (
    ends_to_leave,
    is_of_lone_pair,
    no_new_partner_helps,
    one_of_a_lone_pair,
)
from slurm_health.preflight.decide.policy import OnStraggler, OnUnchecked, Policy
from slurm_health.records.errors import ExitCode
from slurm_health.records.nodeset import fold
from slurm_health.records.records import Disposition, JobOutcome, VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict, StorageBlame


@dataclass(frozen=True, kw_only=True)
class Drain:
    """A node to take out of the pool: for this component, and why in words."""

    node: str
    component: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is done about a verdict: nodes are drained, then given back, then the job goes or stays.

    Args:
        outcome: what becomes of the job, with the nodes that it goes on with if not all.
        drain: nodes to drain.
        left_alone: faulty nodes that are not drained, and why.
        drop: nodes that the job gives back before it goes on, and why.
        leave: nodes that the requeued job must not come back to.
        may_stay: it goes on where it is if Slurm refuses to requeue it.
    """

    outcome: JobOutcome
    drain: tuple[Drain, ...] = ()
    left_alone: tuple[tuple[str, ...], str] = ((), "")
    drop: tuple[tuple[str, ...], str] = ((), "")
    leave: tuple[str, ...] = ()
    may_stay: bool = False


def exit_code(verdict: VerdictReached) -> ExitCode:
    """Return the code a check with this verdict ends with."""
    nodes = {node.level for node in verdict.nodes}
    links = {link.level for link in (*verdict.paths, *verdict.leaves)}
    if (nodes | links) & {Level.FAULTY, Level.SLOW}:
        return ExitCode.BAD_NODES
    # A link that was slow once and could not be tried again leaves every node decided.
    unclear = Level.INCONCLUSIVE in nodes or verdict.storage
    return ExitCode.INCONCLUSIVE if unclear else ExitCode.HEALTHY


def unwanted(
    verdict: VerdictReached, policy: Policy, *, batch_node: str
) -> tuple[NodeVerdict, ...]:
    """Return the nodes that the job should not run on: faulty ones and, by the policy, slow ones.

    Of two nodes with a bad path between them it is one, as a `PathEnd`; also of two that are all
    that a job has and cannot exchange data, though nothing shows which of them is at fault.
    """
    slow = policy.on_straggler is OnStraggler.EXCLUDE
    levels = {Level.FAULTY, Level.SLOW} if slow else {Level.FAULTY}
    judged = tuple(node for node in verdict.nodes if node.level in levels)
    ends = ends_to_leave(verdict, left=_names(judged), batch_node=batch_node, slow=slow)
    pair = () if judged else one_of_a_lone_pair(verdict, batch_node=batch_node)
    return (*judged, *ends, *pair)


def decide(verdict: VerdictReached, policy: Policy, facts: JobFacts) -> Decision:
    """Decide what is done about a verdict.

    Guarantees: only proven faults of nodes are drained; a job that can run on some of its nodes
    does so rather than go back into the queue; neither slowness, nor doubt, nor a bad path ends a
    job; a job leaves what is slow only for nodes that it has or can have at once; so it leaves one
    of two nodes that cannot exchange data, and that twice at most, since a third pair shows that
    no node is the reason.
    """
    case = _Case(verdict, policy, facts)
    avoid = case.avoid
    must = tuple(n for n in avoid if n.level is not Level.SLOW and not is_of_lone_pair(n))
    faulty = tuple(node for node in avoid if node.level is Level.FAULTY)
    # From the way that avoids most to the one that has to be.
    for leave in filter(None, dict.fromkeys((avoid, must, faulty))):
        fewer = case.on_fewer(leave)
        if fewer is not None:
            return fewer
        if not case.obstacle(leave):
            return case.requeued(leave)
    if faulty and not policy.stops:
        why = f"{case.obstacle(must)}; starting anyway: its user asked for no check"
        return case.decision(Disposition.PROCEED, f"{_because(must)}; {why}")
    if faulty:
        without = {*_names(must), *facts.left_behind}
        cannot_drop = f"could not give nodes back: {facts.cannot_drop}" if facts.cannot_drop else ""
        reasons = (
            f"{fold(_names(must))} cannot be used: {_because(must)}",
            cannot_drop,
            case.obstacle(must),
            submit_without(without, facts),
        )
        return case.decision(Disposition.STOP, "; ".join(filter(None, reasons)))
    fewer = case.on_fewer(())
    if fewer is not None:
        return fewer
    reason = case.staying_on(avoid) if avoid else _all_nodes(verdict)
    return case.decision(Disposition.PROCEED, reason)


def decide_unasked(
    verdict: VerdictReached, avoid: Sequence[NodeVerdict], problem: str
) -> JobOutcome:
    """Decide what becomes of a job with unwanted nodes if Slurm does not answer."""
    why = f"{_because(avoid)}; could not query Slurm: {problem}"
    if any(node.level is Level.FAULTY for node in avoid):
        disposition, reason = Disposition.STOP, f"{why}; submit the job again"
    else:
        disposition, reason = Disposition.PROCEED, f"{why}; continuing anyway{_cost(avoid)}"
    return JobOutcome(disposition=disposition, exit_code=exit_code(verdict), reason=reason)


class _Case:
    """All that a decision rests on."""

    def __init__(self, verdict: VerdictReached, policy: Policy, facts: JobFacts) -> None:
        self.verdict = verdict
        self.policy = policy
        self.facts = facts
        self.avoid = unwanted(verdict, policy, batch_node=facts.batch_node)

    def decision(
        self,
        disposition: Disposition,
        reason: str,
        *,
        nodes: Sequence[str] = (),
        spares: Sequence[str] = (),
        drop: tuple[tuple[str, ...], str] = ((), ""),
    ) -> Decision:
        drain, left_alone = self._drains()
        code, storage = exit_code(self.verdict), self.verdict.storage
        stop = self.policy.on_unchecked is OnUnchecked.STOP
        if disposition is Disposition.PROCEED:
            reason = "; ".join([reason, *(one.reason for one in storage)])
            if stop and any(one.blame is StorageBlame.SERVER for one in storage):
                disposition, code = Disposition.STOP, ExitCode.UNAVAILABLE
                reason, nodes, spares, drop = f"{reason} (--on-unchecked=stop)", (), (), ((), "")
        outcome = JobOutcome(
            disposition=disposition,
            exit_code=code,
            reason=reason,
            nodes=list(nodes),
            spares=list(spares),
        )
        return Decision(outcome=outcome, drain=drain, left_alone=left_alone, drop=drop)

    def _drains(self) -> tuple[tuple[Drain, ...], tuple[tuple[str, ...], str]]:
        """Return the nodes to drain, and those that are not, with the reason."""
        if not self.facts.may_drain:
            return (), ((), "")
        faulty = [node for node in self.verdict.nodes if node.level is Level.FAULTY]
        total = len(self.verdict.nodes)
        if len(faulty) > max(1, int(self.policy.max_bad_share * total)):
            count = f"{len(faulty)} of {total} nodes bad at once"
            return (), (_names(faulty), f"{count}: probably a fabric or software problem")
        drains = [
            # "compute device 3" is about compute: what a test on the node is chosen by.
            Drain(
                node=node.node,
                component=node.component.partition(" ")[0],
                reason=f"{node.component}: {node.reason}",
            )
            for node in faulty
            if node.node not in self.facts.drained
        ]
        return tuple(drains), ((), "")

    def obstacle(self, leave: Sequence[NodeVerdict]) -> str:
        """Say why the job is not to be requeued without these nodes, empty if it may be."""
        facts, limit = self.facts, self.policy.max_requeues
        names = _names(leave)
        obstacle = requeue_obstacle(facts, names)
        if not obstacle and facts.requeues >= limit:
            times = f"already requeued {facts.requeues} times because of bad nodes"
            obstacle = f"{times}, the limit is {limit} (--max-requeues)"
        obstacle = obstacle or no_new_partner_helps(leave, facts.requeues)
        if obstacle or not any(n.level is Level.SLOW or is_of_lone_pair(n) for n in leave):
            return obstacle
        return wait_obstacle(facts, [n.node for n in self.verdict.nodes if n.node not in names])

    def requeued(self, leave: Sequence[NodeVerdict]) -> Decision:
        """Start again elsewhere."""
        bad = any(node.level is not Level.INCONCLUSIVE for node in leave)
        drain, left_alone = self._drains()
        return Decision(
            outcome=JobOutcome(
                disposition=Disposition.REQUEUE,
                exit_code=ExitCode.BAD_NODES if bad else ExitCode.INCONCLUSIVE,
                reason=_because(leave),
            ),
            drain=drain,
            left_alone=left_alone,
            leave=_names(leave),
            may_stay=not any(node.level is Level.FAULTY for node in leave),
        )

    def on_fewer(self, leave: Sequence[NodeVerdict]) -> Decision | None:
        """Go on without these nodes and give the rest back; None if it cannot, or keeps all."""
        policy, facts = self.policy, self.facts
        wanted = policy.nodes_wanted
        fit = [node for node in self.verdict.nodes if node.node not in _names(leave)]
        least = policy.nodes_needed
        if wanted is None or len(fit) < (wanted if least is None else least):
            return None
        # The batch node stays whatever comes; then certain before uncertain, fast before slow.
        best = sorted(
            fit,
            key=lambda node: (
                node.node != facts.batch_node,
                node.level is not Level.HEALTHY,
                node.level is Level.FAULTY,
                node.node in policy.last_choice,
                node.slowdown,
            ),
        )
        kept = {node.node for node in best[:wanted]}
        well = {node.node for node in fit if node.level is Level.HEALTHY}
        names = _names(self.verdict.nodes)
        spares = tuple(n for n in names if policy.keep_spares and n in well and n not in kept)
        drop = tuple(name for name in names if name not in kept and name not in spares)
        if not (drop or spares) or facts.batch_node not in kept or (drop and facts.cannot_drop):
            return None
        going = [node for node in self.avoid if node.node not in kept]
        staying = [node for node in self.avoid if node.node in kept]
        why = _because(going) or "not needed"
        why += f"; {self.staying_on(staying)}" if staying else ""
        keep = tuple(name for name in names if name in kept)
        reason = _all_nodes(self.verdict, avoided=_names(self.avoid))
        if drop:
            reason = f"continuing on {fold(keep)}, without {fold(drop)}: {why}"
        return self.decision(
            Disposition.PROCEED, reason, nodes=keep, spares=spares, drop=(drop, why)
        )

    def staying_on(self, nodes: Sequence[NodeVerdict]) -> str:
        """Say why the job runs on nodes that it would rather leave, and what that may cost."""
        why = self.obstacle(self.avoid)
        anyway = f"continuing with {fold(_names(nodes))} anyway{_cost(nodes)}"
        return "; ".join(filter(None, (_because(nodes), why, anyway)))


def _all_nodes(verdict: VerdictReached, avoided: Sequence[str] = ()) -> str:
    """Say what is to be said of nodes that the job runs on as if nothing were wrong."""
    reasons = [
        f"the connection {'-'.join(link.ends)} is bad, no node is to blame"
        f"{_at_worst(link.slowdown, 'network')}"
        for link in (*verdict.paths, *verdict.leaves)
        if link.level is not Level.INCONCLUSIVE and not {*link.ends} & {*avoided}
    ]
    slow = [n for n in verdict.nodes if n.level is Level.SLOW and n.node not in avoided]
    if slow:
        reasons.append(f"{fold(_names(slow))} slow, reported only{_cost(slow)}")
    undecided = [node.node for node in verdict.nodes if node.level is Level.INCONCLUSIVE]
    if undecided:
        reasons.append(f"{fold(undecided)} undecided, continuing anyway")
    return "; ".join(reasons) or "all healthy"


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
