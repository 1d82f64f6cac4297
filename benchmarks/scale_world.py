# SPDX-License-Identifier: Apache-2.0
"""Nodes that are simulated around the real code of agents and master, on a clock of their own.

What is real: the master, each node's agent, the Localizer, and the journal, in files of this
machine. What is played: Slurm, the worker processes and what they measure, how long an open takes,
and the clock. Everything runs in one thread, so a run comes out the same each time; only what the
master's own work adds to the clock is measured and differs.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.scale_node import LAUNCH_S, LOAD_S, LOAD_SPREAD_S, Bad, Clock, Filesystem, Node
from slurm_health.preflight import orders
from slurm_health.preflight.agent.workers import AgentSettings
from slurm_health.records.records import AgentsLost


class Cluster:
    """All nodes, and what is to happen to them when. It is the master's launcher as well."""

    def __init__(
        self,
        nodes: int,
        bad_share: float,
        files: Filesystem,
        clock: Clock,
        *,
        settings: Callable[[str, int], AgentSettings],
        groups_now: Callable[[], Sequence[Sequence[str]]],
        bell_works: bool,
        leaf_size: int,
        seed: int = 0,
    ) -> None:
        self.settings = settings
        self.groups_now = groups_now
        self.bell_works = bell_works
        self._rung: list[bytes] = []
        self._ringers = orders.Ringers()
        self._heard_of: set[str] = set()  # the nodes whose files the master is to read
        self.awake: Node | None = None
        self.seed = seed
        self.clock = clock
        self._files = files
        files.heard_of = self._heard
        names = [f"n{number:05d}" for number in range(nodes)]
        chosen = random.Random(seed).sample(names, round(nodes * bad_share))
        kinds = dict(zip(chosen, itertools.cycle(Bad)))
        self.nodes = {
            name: Node(name, _leaf(number, leaf_size), self, kinds.get(name))
            for number, name in enumerate(names)
        }
        self.bad = set(chosen)
        self.agents_read = 0
        self._groups: dict[str, list[Node]] = {}
        self._groups_of = -1
        self._queue: list[tuple[float, int, Node]] = []
        self._numbers = itertools.count()
        self._round_s: dict[int, float] = {}
        self._told_s = 0.0  # when the master last wrote orders

    @property
    def measuring_s(self) -> float:
        """How long the nodes loaded and measured: what no master can shorten."""
        return LAUNCH_S + LOAD_S + LOAD_SPREAD_S + sum(self._round_s.values())

    def measured(self, index: int, took_s: float) -> None:
        """Note how long a node's part in a round takes."""
        self._round_s[index] = max(self._round_s.get(index, 0.0), took_s)

    def number(self) -> int:
        """Return a number that grows, to keep what happens at the same time in order."""
        return next(self._numbers)

    def at(self, when_s: float, node: Node) -> None:
        """Wake a node at this time."""
        heapq.heappush(self._queue, (when_s, self.number(), node))

    def group_at(self, index: int, meeting: Mapping[str, Any]) -> list[Node]:
        """Return who meets there; played workers do not connect."""
        if index != self._groups_of:
            self._groups_of = index
            self._groups = {
                f"{index}/{group[0]}": [self.nodes[name] for name in group]
                for group in self.groups_now()
            }
        return self._groups[meeting["prefix"].split("/", 1)[1]]

    def rings(self, data: bytes) -> None:
        """Let the master hear what a node has written."""
        if self.bell_works:
            self._rung.append(data)

    def _heard(self, file: str) -> bool:
        """Tell whether whoever opens this file to read it was told that it has news."""
        if self._files.actor == "agents":
            node = self.awake
            if f"{file}.txt" != orders.NAME or node is None:
                return True  # its own file, when it starts
            heard, node.heard = node.heard, False
            return heard
        if file not in self.nodes:
            return True  # the master's own, when it starts
        heard = file in self._heard_of
        self._heard_of.discard(file)
        return heard

    @contextlib.contextmanager
    def _agents_at_work(self) -> Iterator[None]:
        """Count what is read and computed as theirs."""
        self.clock.master_works(False)
        self._files.actor = "agents"
        read_before = self._files.bytes_read()
        yield
        self.agents_read += self._files.bytes_read() - read_before
        self._files.actor = "master"
        self.clock.master_works(True)

    # --- as the master's launcher --------------------------------------------------------------

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        """Start agents."""
        self._told_s = self.clock()
        for name in nodes:
            self.nodes[name].starts(self.settings(name, launch), self._told_s + LAUNCH_S)

    def ring(self) -> None:
        """Let all agents hear that there are orders."""
        self._told_s = self.clock()
        if self.bell_works:
            with self._agents_at_work():
                for node in self.nodes.values():
                    node.hears()

    def wait(self, timeout_s: float, gather_s: float) -> list[orders.News]:
        """Let everything happen that happens while the master waits."""
        with self._agents_at_work():
            began_s = self.clock.now_s
            until_s, gathers = began_s + timeout_s, False
            while True:
                if self._rung and not gathers:
                    heard_s = max(began_s, self.clock.now_s)
                    until_s, gathers = min(until_s, heard_s + gather_s), True
                if not self._queue or self._queue[0][0] > until_s:
                    break
                at_s, _, node = heapq.heappop(self._queue)
                # While the master worked, so did they; but nobody read what was not yet written.
                self.clock.now_s = max(at_s, self._told_s)
                node.wake(at_s)
            self.clock.now_s = max(began_s, until_s)
            rung, self._rung = self._rung, []
        news = self._ringers.rung(b"".join(rung))
        self._heard_of |= {one.node for one in news if not one.data}
        return news

    def poll(self) -> list[AgentsLost]:
        """Return nothing: no agent ends by itself."""
        return []

    def stop(self, leave_s: float = 0.0) -> None:
        """Do nothing: the simulation is over."""


def _leaf(number: int, size: int) -> str:
    """Name the leaf switch of a node; empty where that is not known."""
    return f"leaf{number // size}" if size else ""
