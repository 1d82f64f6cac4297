# SPDX-License-Identifier: Apache-2.0
"""Which idle nodes a sweep checks next, and with which partners: nodes that never met. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import combinations

# Two nodes that disagree accuse each other; a third one decides.
FEWEST = 3

Meetings = Mapping[frozenset[str], int]


def at_once(nodes: int, share: float) -> int:
    """Return how many nodes of a partition may be in checks of a sweep: never all of them."""
    return min(max(FEWEST, int(share * nodes)), nodes - 1)


def groups(
    idle: Mapping[str, float],
    meetings: Meetings,
    *,
    due: Set[str],
    size: int,
    room: int,
) -> list[tuple[str, ...]]:
    """Return groups of idle nodes to check now, the one that waits longest first.

    Args:
        idle: idle nodes, and when the last check of each began; 0 for never.
        meetings: how often two nodes were in one check.
        due: the nodes to check; the others are no reason for a check, only partners.
        size: nodes of a group; the last one may have fewer.
        room: how many nodes there may be in all groups together.
    """
    free = sorted(idle, key=lambda node: (node not in due, idle[node], node))
    chosen: list[tuple[str, ...]] = []
    while True:
        count = min(size, room - sum(map(len, chosen)), len(free))
        if count < FEWEST or free[0] not in due:
            return chosen
        group = [free[0]]
        while len(group) < count:
            met = {
                node: sum(meetings.get(frozenset({node, member}), 0) for member in group)
                for node in free
                if node not in group
            }
            # A due node before others; then a stranger; then the one that waits longest.
            group.append(min(met, key=lambda node: (node not in due, met[node], idle[node])))
        free = [node for node in free if node not in group]
        chosen.append(tuple(sorted(group)))


def meetings(checks: Sequence[Sequence[str]], among: Mapping[str, float]) -> Meetings:
    """Return how often two nodes, of some, were in one check."""
    counts: dict[frozenset[str], int] = {}
    for check in checks:
        for pair in combinations([node for node in check if node in among], 2):
            counts[frozenset(pair)] = counts.get(frozenset(pair), 0) + 1
    return counts
