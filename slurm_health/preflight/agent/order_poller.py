# SPDX-License-Identifier: Apache-2.0
"""When an agent reads the master's orders, and since when the master has said nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from slurm_health.preflight import orders
from slurm_health.preflight.orders import Bell
from slurm_health.records.records import Record

# How long a client of a network filesystem may take to show the master's file.
JOURNAL_VISIBLE_S = 15.0
# The pause between two looks of an agent whose bell works: this, or twice as long.
BELL_POLL_S = 1.0
# A ring makes all look; in a large run within this time, which is this share of a poll's interval.
SPREAD_S = 1.0
SPREAD_SHARE = 1 / 16


class JournalNotVisible(Exception):
    """This node does not see the master's journal."""


def at_random() -> float:
    """Return a number from 0 to 1, for which the module `random` need not be loaded."""
    return int.from_bytes(os.urandom(4), "big") / (1 << 32)


class OrderPoller:
    """Reads one node's orders: when the bell rings, and now and then.

    Args:
        directory: the run's, where the orders are.
        bell: this node's end of it.
        node: whose orders are read.
        poll_s: the pause between two looks while the bell does not ring.
        monotonic: a clock that never goes back.
        random: numbers from 0 to 1, so that not all nodes look at the same time.
    """

    def __init__(
        self,
        directory: Path,
        bell: Bell,
        *,
        node: str,
        poll_s: float,
        monotonic: Callable[[], float],
        random: Callable[[], float],
    ) -> None:
        self._orders = orders.OrderReader(directory, node)
        self._bell = bell
        self._poll_s = poll_s
        self._monotonic = monotonic
        self._random = random
        self._rung = False
        self._bell_works = False
        self._news_s = self._looked_s = self.next_s = 0.0

    @property
    def secret(self) -> str:
        """What names the meetings of this run's groups."""
        return self._orders.secret

    def first_orders(self, run_id: str) -> list[Record]:
        """Return the master's first orders, which must be those of this run.

        Raises:
            JournalNotVisible: this node does not see the master's journal.
            JournalError: it cannot be read.
        """
        give_up = self._monotonic() + JOURNAL_VISIBLE_S
        backlog: list[Record] = []
        while self._monotonic() < give_up:
            backlog += self._orders.read_new()
            if self._orders.run_id == run_id:
                self._news_s = self._looked_s = self._monotonic()
                self.next_s = self._looked_s + self._poll_s
                return backlog
            time.sleep(self._poll_s)
        raise JournalNotVisible(str(self._orders.path))

    def listen(self) -> None:
        """Look soon if the master has rung."""
        if self._bell.rang():
            self._rung = True
            # It rings for all at the same time, and a filesystem serves only so many at once.
            spread_s = min(SPREAD_S, self._poll_s * SPREAD_SHARE) * self._random()
            self.next_s = min(self.next_s, self._monotonic() + spread_s)

    def look(self, silence_s: float) -> list[Record] | None:
        """Return what is new; None where the master has said nothing for longer than `silence_s`.

        Raises:
            JournalError: the orders cannot be read.
        """
        news = self._orders.read_new()
        looked_before_s, self._looked_s = self._looked_s, self._monotonic()
        rung, self._rung = self._rung, False
        self._bell_works = rung or (self._bell_works and not news)
        poll_s = self._poll_s
        if self._bell_works:
            poll_s = max(poll_s, BELL_POLL_S) * (1.0 + self._random())
        self.next_s = self._looked_s + poll_s
        # What held us up, as a filesystem that hung, may have held up the master as well.
        if news or self._looked_s - looked_before_s > silence_s / 2:
            self._news_s = self._looked_s
        return None if self._looked_s - self._news_s > silence_s else news
