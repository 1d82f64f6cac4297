# SPDX-License-Identifier: Apache-2.0
"""Agents that each node's torchrun runs: what a watch and they say travels through its store."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from slurm_health.torchrun.in_job.monitor import Carrier
from slurm_health.training.monitor.agents import Agents, AgentsEnded, start_carried
from slurm_health.training.monitor.messages import INSPECT

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

# An agent that answers each word with the report of a node on which nothing is, and the word.
MONITOR = """
import os, sys
from slurm_health.training.diagnosis.samples import Look, NodeReport
from slurm_health.training.monitor.messages import lines_of
for number, word in enumerate(sys.stdin):
    seen = {"word": word.strip(), "process": str(os.getpid())}
    report = NodeReport(node=sys.argv[1], look=Look.INSPECTION, not_seen=seen)
    for line in lines_of(report, number):
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
        self.reading, self.writing = self.carriers[0].open_ends()
        self.control, self.script = os.pipe()
        for each in self.carriers:
            each.begin()

    def agents(self) -> Agents:
        numbers = iter(range(1, 9))
        agents = Agents(
            lambda _: start_carried(self.reading, self.writing, next(numbers), self.control),
            lambda _: None,
            self.control,
            alone=False,
        )
        agents.begin(NODES)
        return agents

    def end(self) -> None:
        for each in self.carriers:
            each.end()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    yield found
    found.end()


def inspected(agents: Agents) -> dict[str, dict[str, str]]:
    """Return what each node answers when all are asked, again if a busy one is late."""
    answers: dict[str, dict[str, str]] = {}
    while answers.keys() != set(NODES):
        reports = agents.ask(INSPECT)
        answers |= {n: r.not_seen for n, r in reports.items() if r.not_seen["word"] == "inspect"}
    return answers


def test_all_nodes_get_the_words_of_the_watch_and_it_their_answers(nodes: Nodes) -> None:
    assert inspected(nodes.agents()).keys() == set(NODES)


@pytest.mark.heavy
def test_what_was_sent_before_agents_were_replaced_is_no_answer_after_it(nodes: Nodes) -> None:
    agents = nodes.agents()
    processes = {answer["process"] for answer in inspected(agents).values()}
    agents.replace(NODES[:1])
    after = {answer["process"] for answer in inspected(agents).values()}

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


def test_a_watch_whose_torchrun_has_ended_knows_it(nodes: Nodes) -> None:
    agents = nodes.agents()
    nodes.end()

    with pytest.raises(AgentsEnded):
        agents.receive(60.0)
