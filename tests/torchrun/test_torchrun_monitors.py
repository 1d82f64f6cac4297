# SPDX-License-Identifier: Apache-2.0
"""Monitors that each node's torchrun runs: what a watch and they say travels through its store."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from slurm_health.preflight.probes.torchrun_monitors import Carrier
from slurm_health.training.monitor.messages import LOOK, NodeLook
from slurm_health.training.monitor.monitors import Monitors, MonitorsEnded, carried

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

# A monitor that answers a look with the message of a node that saw nothing, and what it was told.
MONITOR = """
import os, sys
from slurm_health.training.monitor.messages import NodeLook, lines_of
for number, word in enumerate(sys.stdin):
    seen = {"word": word.strip(), "process": str(os.getpid())}
    for line in lines_of(NodeLook(sys.argv[1], not_seen=seen), number):
        os.write(1, line)
"""
NODES = ["node0", "node1", "node2"]


class Nodes:
    """Three nodes that train together, each with a carrier of its own."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore

        self._server: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._server.port
        self.carriers = []
        for rank, name in enumerate(NODES):
            store: Any = TCPStore("127.0.0.1", port, is_master=False)
            command = [sys.executable, "-c", MONITOR, name]
            self.carriers.append(Carrier(store, rank, len(NODES), command, dict(os.environ)))
        self.reading, self.writing = self.carriers[0].serve()
        self.control, self.script = os.pipe()
        for each in self.carriers:
            each.begin()

    def start(self, number: int) -> Monitors:
        return carried(self.reading, self.writing, number, NODES, self.control)

    def end(self) -> None:
        for each in self.carriers:
            each.end()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    yield found
    found.end()


def looked(monitors: Monitors) -> dict[str, dict[str, str]]:
    """Return what each node saw when all were asked to look, again where a busy one is late."""
    seen: dict[str, dict[str, str]] = {}
    while seen.keys() != set(NODES):
        said = [each for each in monitors.ask(LOOK) if isinstance(each, NodeLook)]
        seen |= {each.node: each.not_seen for each in said if each.not_seen["word"] == "look"}
    return seen


def test_all_nodes_hear_the_watch_and_it_hears_them(nodes: Nodes) -> None:
    assert looked(nodes.start(1)).keys() == set(NODES)


@pytest.mark.heavy
def test_what_was_said_before_a_start_is_no_answer_to_what_is_asked_after_it(nodes: Nodes) -> None:
    before = nodes.start(1)
    processes = {each["process"] for each in looked(before).values()}
    before.tell(LOOK)  # and nobody waits for the answers
    before.end()
    after = {each["process"] for each in looked(nodes.start(2)).values()}

    assert len(after) == len(NODES)
    assert not after & processes


def test_names_come_in_the_order_of_ranks_however_late_a_node_is(nodes: Nodes) -> None:
    heard: list[list[str]] = []
    first, second, third = nodes.carriers
    waits = threading.Thread(target=lambda: heard.append(first.names("a")))
    waits.start()
    others = threading.Thread(target=lambda: heard.append(second.names("b")))
    others.start()
    heard.append(third.names("c"))
    waits.join()
    others.join()

    assert heard == [["a", "b", "c"]] * 3


def test_a_watch_whose_torchrun_has_ended_is_told_so(nodes: Nodes) -> None:
    monitors = nodes.start(1)
    nodes.end()

    with pytest.raises(MonitorsEnded):
        list(monitors.hear(60.0))
