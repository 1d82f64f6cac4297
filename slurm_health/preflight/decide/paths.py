# SPDX-License-Identifier: Apache-2.0
"""Which nodes a job leaves because of a bad path between two of them: pure.

Either end is well with everybody else, and nothing is held against it. But a job on both may hang
where one collective has the two talk to each other, or wait for the path at each step; it is spared
that by leaving one of them.
"""

from __future__ import annotations

from collections.abc import Collection

from slurm_health.records.records import VerdictReached
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict


class PathEnd(NodeVerdict, frozen=True, kw_only=True):
    """A node that a job should leave because of its path to another one.

    It says what the path does to the job, and nothing about the node: SLOW where the path is slow,
    and HEALTHY, as the node is, where nothing passes. It is for a decision, never for a journal.
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
        if path.level in levels and len(path.ends) > 1 and {*path.ends} <= {*names} - {*left}
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
