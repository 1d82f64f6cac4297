# SPDX-License-Identifier: Apache-2.0
"""What is known of a node, from its agent's words and the loss of that."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_health.records.records import (
    AgentsLaunched,
    AgentsLost,
    DevicesUnopened,
    LossCause,
    NodeReported,
    NodesAdmitted,
    Record,
    RoundEnded,
    RoundStarted,
    Sampled,
    VerdictReached,
    WorkersFailed,
    WorkersReady,
    WorkersStarting,
)
from slurm_health.records.verdict import Level, Outcome
from tests.support.session_story import LIMITS, NODES, Story, measured, ready, started

ECC = "device 3: CUDA error: uncorrectable ECC error encountered"


def device_failed(node: str, torch: str = "2.4") -> list[Record]:
    failed = WorkersFailed(node=node, launch=0, reason=ECC, device_failed=True, torch=torch)
    return [started(node), failed]


def ends(story: Story, *nodes: str) -> dict[str, tuple[Level, str]]:
    """Let these nodes pass all rounds; return what is concluded about all."""
    while not isinstance(record := story.writes(), VerdictReached):
        if isinstance(record, RoundStarted):
            story.says(*measured(*nodes, index=record.round))
    return {node.node: (node.level, node.reason) for node in record.nodes}


@pytest.mark.parametrize(
    ("failing", "torch", "level", "reason"),
    [
        (["n4"], "2.4", Level.FAULTY, f"{ECC}, twice; most nodes can use theirs"),
        (["n4"], "2.6", Level.INCONCLUSIVE, f"could not be measured: {ECC}"),
        (["n3", "n4"], "2.4", Level.INCONCLUSIVE, f"could not be measured: {ECC}"),
    ],
    ids=["one", "one with another torch", "half"],
)
def test_a_device_that_failed_twice_is_the_nodes_fault_unless_the_softwares_it_may_be(
    failing: list[str], torch: str, level: Level, reason: str
) -> None:
    story = Story()
    story.does(AgentsLaunched)
    well = [node for node in NODES if node not in failing]
    story.is_ready(*well)
    for node in failing:
        story.says(*device_failed(node, torch))

    concluded = ends(story, *well)

    assert {concluded[node] for node in failing} == {(level, reason)}


@pytest.mark.parametrize(
    ("kept", "opens", "level"),
    [
        (True, False, Level.FAULTY),
        (False, False, Level.INCONCLUSIVE),
        (True, True, Level.HEALTHY),
    ],
    ids=["never", "driver keeps no state", "late"],
)
def test_a_node_whose_devices_do_not_open_is_faulty_unless_its_driver_starts_anew_for_them(
    kept: bool, opens: bool, level: Level
) -> None:
    story = Story()
    story.does(AgentsLaunched)
    for node in ("n1", "n2", "n3"):
        story.says(replace(started(node), driver_keeps_state=True), ready(node))
    unopened = DevicesUnopened(node="n4", launch=0, devices=[2, 5], waited_s=21.3, torch="2.4")
    story.says(replace(started("n4"), driver_keeps_state=kept), unopened)
    if opens:
        story.says(ready("n4"))
    else:
        story.now_s += LIMITS.ready_s

    well = NODES if opens else NODES[:3]
    concluded = ends(story, *well)["n4"]

    assert concluded[0] is level
    if level is Level.FAULTY:
        assert concluded[1] == "devices 2, 5 not opened within 21 s; most nodes can use theirs"


def test_a_device_that_fails_between_rounds_makes_its_node_faulty() -> None:
    story = Story()
    story.is_in_round()
    story.says(*measured(*NODES))
    story.does(RoundEnded)
    story.says(WorkersStarting(node="n4", launch=0), *device_failed("n4")[1:])

    assert ends(story, "n1", "n2", "n3")["n4"][0] is Level.FAULTY


def test_a_node_that_computed_wrongly_once_and_correctly_afterwards_is_faulty() -> None:
    story = Story()
    story.is_in_round()
    wrong = "device 5 computes wrong results: 1 of 1048576 values are not exact"
    story.says(
        *(values(node, 0) for node in ("n1", "n2", "n3")),
        *measured("n1", "n2", "n3"),
        NodeReported(
            node="n4",
            round=0,
            outcome=Outcome.FAILED,
            detail=wrong,
            crashed=True,
            wrong_results=True,
        ),
    )
    story.does(RoundEnded)
    story.says(*(values(node, 1) for node in NODES))

    level, reason = ends(story, *NODES)["n4"]

    assert level is Level.FAULTY
    assert wrong in reason


def values(node: str, index: int) -> Record:
    return Sampled(
        node=node,
        round=index,
        group=[node],
        probe="values",
        iteration_ms=[[]],
        figures={"products": 4, "wrong": 0},
    )


def test_where_nobody_gets_ready_every_node_is_undecided() -> None:
    story = Story()
    story.does(AgentsLaunched)
    for node in NODES:
        story.says(started(node), WorkersFailed(node=node, launch=0, reason="no torch"))

    assert story.verdict() == dict.fromkeys(
        NODES, (Level.INCONCLUSIVE, "could not be measured: no torch")
    )
    assert story.next() == ()


@pytest.mark.parametrize(
    "odd",
    [
        ready("n4", torch="1.13", devices=4),
        # Its ranks would wait for ranks that never come, and the fault be its partner's.
        ready("n4", devices=2),
    ],
    ids=["other torch", "fewer devices"],
)
def test_a_node_unlike_the_others_is_not_compared_with_them(odd: WorkersReady) -> None:
    story = Story()
    story.does(AgentsLaunched)
    for node in ("n1", "n2", "n3"):
        story.says(started(node), ready(node, devices=4))
    story.says(started("n4"), odd)

    assert story.does(NodesAdmitted) == NodesAdmitted(nodes=["n1", "n2", "n3"])


def test_an_agent_that_sees_no_journal_is_not_started_again_and_its_node_not_to_blame() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.is_ready("n1", "n2", "n3")
    blind = "does not see the master's journal"
    story.says(AgentsLost(launch=0, nodes=["n4"], reason=blind, cause=LossCause.NO_JOURNAL))

    assert story.does(NodesAdmitted) == NodesAdmitted(nodes=["n1", "n2", "n3"])
    assert story.controller.state.agents["n4"].no_journal
    assert story.controller.state.agents["n4"].failed == blind


def test_a_late_word_of_an_agent_that_was_replaced_counts_for_nothing() -> None:
    story = Story(["n1"])
    story.does(AgentsLaunched)
    story.says(AgentsLost(launch=0, nodes=["n1"], reason="killed"))
    story.relaunches()

    story.is_ready("n1", launch=0)

    story.waits()


def test_a_node_that_is_ready_too_late_is_not_said_to_be_unlike_the_others() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.is_ready("n1", "n2", "n3")
    story.says(started("n4"))
    admitted = story.does(NodesAdmitted, at_s=story.now_s + LIMITS.ready_s)
    assert admitted == NodesAdmitted(nodes=["n1", "n2", "n3"])
    story.is_ready("n4")
    story.measures("n1", "n2", "n3", rounds=3)

    level, reason = story.verdict()["n4"]

    assert level is Level.INCONCLUSIVE
    assert "not ready in time" in reason
