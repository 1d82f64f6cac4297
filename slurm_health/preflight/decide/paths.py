# SPDX-License-Identifier: Apache-2.0
"""Which nodes a job leaves because of a bad path between two of them: pure.

Either end is well with everybody else, and nothing is held against it. But a job on both may hang
where one collective has the two talk to each other, or wait for the path at each step; it is spared
that by leaving one of them. So is a job of two nodes that cannot exchange data, where no third node
tells which of them is at fault: the next check has another partner, and decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from slurm_health.records.records import VerdictReached
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict

_PAIR = 2
_PARTNERS = 2  # after two moves no node is left of the first pair
_ALIKE = 2  # digits of a probability: what is known from earlier moves it by more than a hundredth


class PathEnd(NodeVerdict, frozen=True, kw_only=True):
    """A node that a job should leave because of its path to another one.

    It says what the path does to the job, and nothing about the node: SLOW where the path is slow,
    and where nothing passes as the node is, HEALTHY, or INCONCLUSIVE if the node itself may be why.
    It is for a decision, never for a journal.
    """


def ends_to_leave(
    verdict: VerdictReached, *, left: Collection[str], batch_node: str, slow: bool
) -> tuple[PathEnd, ...]:
    """Return one end of each path that does not work, and with `slow` of each slow one.

    What most paths have in common goes first, so that few nodes are left; the batch node, which a
    job cannot give back, stays if it can. Of two that are alike it is the later one. No node helps
    against a path between switches, which any two nodes share.

    Args:
        verdict: of the check.
        left: nodes that the job leaves anyway; their paths do not matter.
        batch_node: where its batch script runs.
        slow: whether slow paths matter.
    """
    levels = {Level.FAULTY, Level.SLOW} if slow else {Level.FAULTY}
    names = [node.node for node in verdict.nodes]
    open_paths = [
        path
        for path in verdict.paths
        if path.level in levels and {*path.ends} <= {*names} - {*left}
    ]
    slowdowns = {node.node: node.slowdown for node in verdict.nodes}

    def rank(node: str) -> tuple[bool, int, float, int]:
        count = sum(node in path.ends for path in open_paths)
        return node != batch_node, count, slowdowns[node], names.index(node)

    chosen = []
    while open_paths:
        node = max({end for path in open_paths for end in path.ends}, key=rank)
        through = [path for path in open_paths if node in path.ends]
        chosen.append(_end(node, through))
        open_paths = [path for path in open_paths if path not in through]
    return tuple(sorted(chosen, key=lambda end: names.index(end.node)))


def one_of_a_lone_pair(verdict: VerdictReached, *, batch_node: str) -> tuple[PathEnd, ...]:
    """Return one of the two nodes of a job that could not exchange data, none of any other job.

    It is the one that is more likely at fault by what is known of it from earlier; of two that are
    alike, the one that is not the batch node.
    """
    if len(verdict.nodes) != _PAIR or any(
        node.level is not Level.INCONCLUSIVE or node.component != "network"
        for node in verdict.nodes
    ):
        return ()

    def rank(node: NodeVerdict) -> tuple[float, bool]:
        return round(node.probability, _ALIKE), node.node == batch_node

    left = min(verdict.nodes, key=rank)
    return (
        PathEnd(
            node=left.node,
            level=Level.INCONCLUSIVE,
            probability=left.probability,
            component="network",
            reason=f"{left.reason}; a job on both may hang, another partner tells which it is",
            evidence=left.evidence,
        ),
    )


def is_of_lone_pair(node: NodeVerdict) -> bool:
    """Tell whether a node is left because its job's only other node may be the one at fault."""
    return isinstance(node, PathEnd) and node.level is Level.INCONCLUSIVE


def no_new_partner_helps(leave: Iterable[NodeVerdict], requeues: int) -> str:
    """Say that another partner would tell nothing new, empty if it would or is not sought."""
    if requeues < _PARTNERS or not any(map(is_of_lone_pair, leave)):
        return ""
    return (
        f"already requeued {requeues} times because of bad nodes: where one pair after another"
        " cannot exchange data, it is the interface or a firewall rather than a node"
    )


def _end(node: str, paths: list[LinkVerdict]) -> PathEnd:
    """Return the verdict on running with this node, by the worst of its paths."""
    broken = [path for path in paths if path.level is Level.FAULTY]
    worst = broken or [max(paths, key=lambda path: path.slowdown)]
    others = ", ".join(end for path in worst for end in path.ends if end != node)
    does = "fails, a job on both may hang" if broken else "is slow"
    return PathEnd(
        node=node,
        level=Level.HEALTHY if broken else Level.SLOW,
        slowdown=worst[0].slowdown,
        probability=worst[0].probability,
        component="network",
        reason=f"the path to {others} {does} ({worst[0].reason})",
        evidence=tuple(line for path in worst for line in path.evidence),
    )
