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


def test_a_node_whose_device_failed_twice_while_most_can_use_theirs_is_faulty() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.is_ready("n1", "n2", "n3")
    story.says(*device_failed("n4"))

    level, reason = ends(story, "n1", "n2", "n3")["n4"]

    assert (level, reason) == (Level.FAULTY, f"{ECC}, twice; most nodes can use theirs")


@pytest.mark.parametrize(
    ("failing", "torch"), [(["n4"], "2.6"), (["n3", "n4"], "2.4")], ids=["other torch", "half"]
)
def test_a_device_that_fails_is_no_fault_where_the_software_may_be(
    failing: list[str], torch: str
) -> None:
    story = Story()
    story.does(AgentsLaunched)
    well = [node for node in NODES if node not in failing]
    story.is_ready(*well)
    for node in failing:
        story.says(*device_failed(node, torch))

    found = ends(story, *well)

    assert {found[node] for node in failing} == {
        (Level.INCONCLUSIVE, f"could not be measured: {ECC}")
    }


def test_a_node_whose_devices_do_not_open_while_most_others_have_is_faulty() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.is_ready("n1", "n2", "n3")
    unopened = DevicesUnopened(node="n4", launch=0, devices=[2, 5], waited_s=21.3, torch="2.4")
    story.says(started("n4"), unopened)
    story.now_s += LIMITS.ready_s

    assert ends(story, "n1", "n2", "n3")["n4"] == (
        Level.FAULTY,
        "devices 2, 5 not opened within 21 s; most nodes can use theirs",
    )


@pytest.mark.parametrize("keep", [True, False])
def test_a_driver_that_keeps_no_state_is_not_accused_for_the_time_that_takes_it(keep: bool) -> None:
    story = Story()
    story.does(AgentsLaunched)
    for node in ("n1", "n2", "n3"):
        story.says(replace(started(node), driver_keeps_state=True), ready(node))
    unopened = DevicesUnopened(node="n4", launch=0, devices=[0], waited_s=21.3, torch="2.4")
    story.says(replace(started("n4"), driver_keeps_state=keep), unopened)
    story.now_s += LIMITS.ready_s

    level, _ = ends(story, "n1", "n2", "n3")["n4"]

    assert level is (Level.FAULTY if keep else Level.INCONCLUSIVE)


def test_devices_that_open_late_are_as_good_as_others() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.is_ready("n1", "n2", "n3")
    unopened = DevicesUnopened(node="n4", launch=0, devices=[0], waited_s=20.0, torch="2.4")
    story.says(started("n4"), unopened, ready("n4"))

    assert ends(story, *NODES)["n4"][0] is Level.HEALTHY


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


def test_the_odd_torch_out_is_not_compared_with_the_others() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.is_ready("n1", "n2", "n3")
    story.is_ready("n4", torch="1.13")

    assert story.does(NodesAdmitted) == NodesAdmitted(nodes=["n1", "n2", "n3"])


def test_a_node_with_fewer_devices_is_not_compared_with_the_others() -> None:
    story = Story()
    story.does(AgentsLaunched)
    for node in ("n1", "n2", "n3"):
        story.says(started(node), ready(node, devices=4))
    story.says(started("n4"), ready("n4", devices=2))

    # Its ranks would wait for ranks that never come, and the fault be its partner's.
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
