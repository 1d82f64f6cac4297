# SPDX-License-Identifier: Apache-2.0
"""Which nodes are free, and who gets them: the first ones, as Slurm gives nodes of equal weight."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable


class Pool:
    """The free nodes of a cluster."""

    def __init__(self, nodes: int) -> None:
        self.free = set(range(nodes))
        self._queue = list(range(nodes))

    def give(self, node: int) -> None:
        """Let a node be free."""
        if node not in self.free:
            self.free.add(node)
            heapq.heappush(self._queue, node)

    def remove(self, node: int) -> None:
        """Let a node be free no longer."""
        self.free.discard(node)

    def fits(self, count: int, avoided: Iterable[int] = ()) -> bool:
        """Tell whether so many nodes are free beside those to avoid."""
        return len(self.free) - sum(node in self.free for node in avoided) >= count

    def take(
        self, count: int, avoided: Collection[int], last: Collection[int] = ()
    ) -> list[int] | None:
        """Return so many free nodes, those of `last` only where others do not suffice."""
        if not self.fits(count, avoided):
            return None
        found: list[int] = []
        aside: list[int] = []
        while len(found) < count and self._queue:
            node = heapq.heappop(self._queue)
            if node not in self.free:
                continue
            self.free.discard(node)
            (aside if node in avoided or node in last else found).append(node)
        wanted = [node for node in aside if node not in avoided][: count - len(found)]
        for node in aside:
            if node not in wanted:
                self.give(node)
        return found + wanted
