# SPDX-License-Identifier: Apache-2.0
"""The time of a simulation, and what is to happen when."""

from __future__ import annotations

import heapq
from collections.abc import Callable

_What = Callable[[], None]


class Clock:
    """An event queue. What is due at the same time happens in the order in which it was asked."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, _What]] = []
        self._number = 0

    def at(self, when_s: float, what: _What) -> None:
        """Let something happen at a time, or now if that is past."""
        self._number += 1
        heapq.heappush(self._queue, (max(when_s, self.now_s), self._number, what))

    def after(self, delay_s: float, what: _What) -> None:
        """Let something happen after a while."""
        self.at(self.now_s + delay_s, what)

    def run(self, until_s: float) -> None:
        """Let everything happen that is due by then."""
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(queue)
            what()
        self.now_s = until_s
