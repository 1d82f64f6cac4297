# SPDX-License-Identifier: Apache-2.0
"""One node of the world of many: its clock, files, bell and workers, played."""

from __future__ import annotations

import functools
import heapq
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from slurm_health.preflight import orders
from slurm_health.preflight.agent.agent import Agent
from slurm_health.preflight.agent.worker_process import (
    Gone,
    Line,
    Ready,
    State,
    Worker,
    line_of,
)
from slurm_health.preflight.agent.workers import AgentSettings
from slurm_health.preflight.orders import Bell
from slurm_health.records.records import Sampled

LAUNCH_S = 0.3  # from srun's start to the agents'
LOAD_S, LOAD_SPREAD_S = 2.5, 0.3  # a worker loads torch
SOLO_S, PAIR_S = 0.9, 0.7  # how long a round's probes take a healthy node
CRASH_AFTER_S = 0.2
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
SLOW_NETWORK = 2.5
_ITERATIONS = 10
_NOISE = 0.02
_TYPICAL_MS = {"matmul": 12.0, "memory_copy": 8.0, "allgather": 6.0, "values": 1.0}


class Bad(Enum):
    """What is wrong with a node."""

    SLOW = "slow"  # its network takes longer, and so do its partners
    CRASHES = "crashes"  # its worker fails in every round


class Clock:
    """The time of the simulation. While the master works, what it computes adds to it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._working_since_s: float | None = None
        self.cpu_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        self._charge()
        return self.now_s

    def master_works(self, works: bool) -> None:
        """Count the processor's time from now on as the master's, or no longer."""
        self._charge()
        self._working_since_s = time.process_time() if works else None

    def _charge(self) -> None:
        if self._working_since_s is not None:
            now_s = time.process_time()
            self.cpu_s += now_s - self._working_since_s
            self.now_s += now_s - self._working_since_s
            self._working_since_s = now_s


@dataclass
class Filesystem:
    """What is asked of the filesystem, and how long it takes to open a file there.

    Opens are seen by the interpreter's audit hook, whoever makes them. What the master opens takes
    `open_s` each; in other threads than its own, `parallel` of them at the same time. `polls` are
    the opens to read a file of whose news nobody had heard.
    """

    clock: Clock
    open_s: float
    parallel: int = 1
    opens: dict[str, int] = field(default_factory=lambda: {"master": 0, "agents": 0})
    polls: dict[str, int] = field(default_factory=lambda: {"master": 0, "agents": 0})
    actor: str = "master"
    heard_of: Callable[[str], bool] = lambda _: True

    def watch(self) -> None:
        """Look at every open of a journal's file from now on; this cannot be undone."""
        main = threading.get_ident()

        def seen(event: str, arguments: tuple[Any, ...]) -> None:
            name, _, flags = arguments if event == "open" else ("", None, 0)
            if not str(name).endswith((".jsonl", orders.NAME)):
                return
            self.opens[self.actor] += 1
            if not flags & _WRITES and not self.heard_of(Path(name).stem):
                self.polls[self.actor] += 1
            if self.actor == "master":
                ways = 1 if threading.get_ident() == main else self.parallel
                self.clock.now_s += self.open_s / ways

        sys.addaudithook(seen)

    def bytes_read(self) -> int:
        """Return what this process has read, from its start."""
        line = Path("/proc/self/io").read_text().splitlines()[0]
        return int(line.split(":")[1])


class PlayedWorker(Worker):
    """A worker process that measures what the simulation says."""

    def __init__(self, node: Node, **_: object) -> None:
        self.local_rank = 0
        self.on_cpus = True
        self.ready = None
        self.states = {}
        self._process = self._watch = None
        self._killed = False
        self._node = node
        node.loads()

    def send(self, command: Mapping[str, object]) -> None:
        """Take a round, or its end."""
        if command["op"] == "abort":
            self._node.says(0.01, _done(command["round"], "timed_out", "was told to stop"))
        else:
            self._node.measures(command)

    def read_lines(self) -> list[Line | Sampled]:
        """Return what it has said by now."""
        lines = [line_of(data) for data in self._node.said()]
        for line in lines:
            if isinstance(line, State):
                self.states[line.state] = line
            elif isinstance(line, Ready):
                self.ready = line
        return lines

    def gone(self) -> Gone | None:
        """Say that it lives."""
        return None


class PlayedBell(Bell):
    """An agent's end of a bell, which is heard at once or never."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.rings = False

    def ring(self, begins: int, lines: bytes) -> None:
        """Tell the master."""
        self._node.rings(b"".join(orders.rings(self._node.name, begins, lines)))

    def rang(self) -> bool:
        """Tell whether the master has rung."""
        rung, self.rings = self.rings, False
        return rung


class World(Protocol):
    """What a node needs of the cluster that it is part of."""

    seed: int
    clock: Clock
    awake: Node | None

    def at(self, when_s: float, node: Node) -> None:
        """Wake a node at this time."""

    def rings(self, data: bytes) -> None:
        """Let the master hear what a node has written."""

    def number(self) -> int:
        """Return a number that grows, to keep what happens at the same time in order."""

    def group_at(self, index: int, meeting: Mapping[str, Any]) -> list[Node]:
        """Return who meets there."""

    def measured(self, index: int, took_s: float) -> None:
        """Note how long a node's part in a round takes."""


class Node:
    """One simulated node, with its real agent once that is started."""

    def __init__(self, name: str, leaf: str, cluster: World, bad: Bad | None) -> None:
        self.name = name
        self._leaf = leaf
        self.bad = bad
        self.agent: Agent | None = None
        self._starting: AgentSettings | None = None
        self.heard = True  # of orders that it has not read; it looks for the first ones at once
        self._bell = PlayedBell(self)
        self._cluster = cluster
        self._random = random.Random(f"{cluster.seed} {name}")
        self._events: list[tuple[float, int, dict[str, Any]]] = []
        self._wakes_s = math.inf

    def starts(self, settings: AgentSettings, at_s: float) -> None:
        """Let the agent start at this time."""
        self._starting, self._wakes_s = settings, at_s
        self._cluster.at(at_s, self)

    def _start(self, settings: AgentSettings) -> None:
        cluster = self._cluster
        self.agent = Agent(
            settings,
            {
                "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
                "SLURM_CPUS_ON_NODE": "1",
                **self._topology(),
            },
            clock=cluster.clock,
            monotonic=cluster.clock,
            make_worker=functools.partial(PlayedWorker, self),
            bell=self._bell,
            random=self._random.random,
        )
        self.agent.begin()
        self._sleep()

    def _topology(self) -> dict[str, str]:
        """Return what Slurm's topology plugin tells a task, where there is one."""
        if not self._leaf:
            return {}
        return {
            "SLURM_TOPOLOGY_ADDR": f"spine.{self._leaf}.{self.name}",
            "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
        }

    def wake(self, at_s: float) -> None:
        """Let the agent look, if this is what it waits for."""
        if at_s != self._wakes_s:
            return
        self._cluster.awake = self
        if self._starting is not None:
            settings, self._starting = self._starting, None
            self._start(settings)
        if self.agent is None:
            return
        self.agent.step()
        if self.agent.serves:
            self._sleep()
        else:
            self.agent.sign_off()
            self.agent = None

    def rings(self, data: bytes) -> None:
        """Let the master hear of this node."""
        self._cluster.rings(data)

    def hears(self) -> None:
        """Let the agent hear that there are orders."""
        if self.agent is not None:
            self._bell.rings = self.heard = True
            self._wakes_s = self._cluster.clock.now_s
            self._cluster.at(self._wakes_s, self)

    def _sleep(self) -> None:
        assert self.agent is not None
        timeout_s = self._cluster.clock.now_s + self.agent.wait_s()
        self._wakes_s = min(timeout_s, self._events[0][0] if self._events else math.inf)
        self._cluster.at(self._wakes_s, self)

    # --- its worker ------------------------------------------------------------------------

    def says(self, after_s: float, event: dict[str, Any]) -> None:
        """Let the worker say something, after a while."""
        at_s = self._cluster.clock.now_s + after_s
        heapq.heappush(self._events, (at_s, self._cluster.number(), event))

    def said(self) -> list[dict[str, Any]]:
        """Return what the worker has said by now."""
        found = []
        while self._events and self._events[0][0] <= self._cluster.clock.now_s:
            found.append(heapq.heappop(self._events)[2])
        return found

    def loads(self) -> None:
        """Let the worker load torch."""
        self._events.clear()
        load_s = LOAD_S + self._random.uniform(0.0, LOAD_SPREAD_S)
        self.says(load_s, {"event": "state", "state": "loaded", "torch": "2.4.0"})
        self.says(load_s, {"event": "state", "state": "opened"})
        self.says(load_s, _ready(load_s))

    def measures(self, command: Mapping[str, Any]) -> None:
        """Let the worker run a round's probes, with its partners as they are."""
        index, pair = command["round"], command["groups"].get("pair")
        group = self._cluster.group_at(index, pair) if pair else [self]
        if self.bad is Bad.CRASHES:
            failure = _done(index, "failed", "RuntimeError: out of memory", own_fault=True)
            self.says(CRASH_AFTER_S, failure)
            return
        slow = any(node.bad is Bad.SLOW for node in group)
        took_s = PAIR_S * (SLOW_NETWORK if slow else 1.0) if pair else SOLO_S
        took_s *= self._random.uniform(0.97, 1.03)
        if any(node.bad is Bad.CRASHES for node in group):
            return  # it waits for that one until it is told to stop
        self._cluster.measured(index, took_s)
        for probe in command["probes"]:
            together = probe["scope"] in {"rail", "pair"}
            factor = SLOW_NETWORK if slow and together else 1.0
            self.says(took_s, self._sample(index, probe, factor, len(group)))
        self.says(took_s, _done(index, "measured"))

    def _sample(
        self, index: int, probe: Mapping[str, Any], factor: float, ranks: int
    ) -> dict[str, Any]:
        typical_ms = _TYPICAL_MS.get(probe["name"], 5.0) * factor
        return {
            "kind": "sampled",
            "round": index,
            "probe": probe["name"],
            "quantity": "",
            "scope": probe["scope"],
            "iteration_ms": [
                [typical_ms * self._random.lognormvariate(0.0, _NOISE) for _ in range(_ITERATIONS)]
            ],
            "world_size": ranks if probe["scope"] == "pair" else 1,
            "total_bytes": 1 << 24,
            "flop": 1e9,
            "figures": {},
        }


def _ready(load_s: float) -> dict[str, Any]:
    return {
        "event": "ready",
        "store_port": 4711,
        "torch": "2.4.0",
        "backend": "gloo",
        "device": "cpu",
        "collective_library": "gloo",
        "model": "cpu with 1 thread",
        "free_bytes": 1 << 30,
        "start_ms": load_s * 1e3,
    }


def _done(index: Any, outcome: str, detail: str = "", *, own_fault: bool = False) -> dict[str, Any]:
    return {
        "event": "done",
        "round": index,
        "outcome": outcome,
        "detail": detail,
        "own_fault": own_fault,
        "wrong_results": False,
        "spent": False,
    }
