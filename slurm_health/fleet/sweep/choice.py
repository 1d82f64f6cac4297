# SPDX-License-Identifier: Apache-2.0
"""Which idle nodes a sweep checks next, and with whom: those who have never met, first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import combinations

# Two nodes that disagree accuse each other; a third one tells.
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
        due: who is to be checked; the others are no reason for a check, only partners.
        size: nodes of a group; the last one may have fewer.
        room: how many nodes there may be in all groups together.
    """
    free = sorted(idle, key=lambda node: (node not in due, idle[node], node))
    found: list[tuple[str, ...]] = []
    while True:
        count = min(size, room - sum(map(len, found)), len(free))
        if count < FEWEST or free[0] not in due:
            return found
        group = _group(free, meetings, due, idle, count)
        free = [node for node in free if node not in group]
        found.append(group)


def _group(
    free: Sequence[str],
    meetings: Meetings,
    due: Set[str],
    idle: Mapping[str, float],
    count: int,
) -> tuple[str, ...]:
    group = [free[0]]
    while len(group) < count:
        met = {
            node: sum(meetings.get(frozenset({node, member}), 0) for member in group)
            for node in free
            if node not in group
        }
        # One that is due before one that is not; then a stranger; then who waits longest.
        group.append(min(met, key=lambda node: (node not in due, met[node], idle[node])))
    return tuple(sorted(group))


def met(checks: Sequence[Sequence[str]], among: Mapping[str, float]) -> dict[frozenset[str], int]:
    """Return how often two nodes, of some, were in one check."""
    found: dict[frozenset[str], int] = {}
    for check in checks:
        for pair in combinations([node for node in check if node in among], 2):
            found[frozenset(pair)] = found.get(frozenset(pair), 0) + 1
    return found
