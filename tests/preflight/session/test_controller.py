# SPDX-License-Identifier: Apache-2.0
"""What the master does next, and what is known of a node from its agent and the loss of that."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.session.controller import Controller, Wait
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.phases import phases
from slurm_health.records.probe_catalog import STORAGE_NODES, STORAGE_PATHS
from slurm_health.records.records import (
    AgentsLaunched,
    AgentsLost,
    DevicesUnopened,
    GroupAborted,
    LossCause,
    NodeReported,
    NodesAdmitted,
    Record,
    RoundEnded,
    RoundStarted,
    Sampled,
    StorageTested,
    VerdictReached,
    WorkersFailed,
    WorkersReady,
)
from slurm_health.records.verdict import Level, Outcome
from tests.support import accusing
from tests.support.rows import rows
from tests.support.session_story import LIMITS, NODES, START_S, Story, measured, ready, started


def test_as_soon_as_all_are_ready_the_first_round_begins_at_the_first_members_store() -> None:
    story = Story()

    assert story.begins() == NodesAdmitted(nodes=list(NODES))
    begun = story.does(RoundStarted)

    assert begun.groups == [["n1", "n2"], ["n3", "n4"]]
    assert [(meet.address, meet.port) for meet in begun.rendezvous] == [
        ("10.0.0.1", 4000),
        ("10.0.0.3", 4000),
    ]
    assert begun.absent == []


def test_losses_that_follow_each_other_closely_are_launched_again_together() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.says(AgentsLost(launch=0, nodes=["n1"], reason="killed"))
    story.says(AgentsLost(launch=0, nodes=["n2"], reason="killed"), at_s=START_S + 0.2)

    waiting = story.waits()

    assert waiting.until_s == START_S + 0.2 + LIMITS.settle_s
    assert story.relaunches() == AgentsLaunched(launch=1, nodes=["n1", "n2"])


def test_a_node_that_slurm_cannot_start_is_tried_apart_from_the_others_and_then_faulty() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.says(
        AgentsLost(launch=0, nodes=["n4"], reason="no answer", cause=LossCause.NOT_STARTED),
        AgentsLost(launch=0, nodes=["n1", "n2", "n3"], reason="Application launch failed"),
    )

    assert story.relaunches() == AgentsLaunched(launch=1, nodes=["n1", "n2", "n3"])
    assert story.relaunches() == AgentsLaunched(launch=2, nodes=["n4"])
    story.is_ready("n1", "n2", "n3", launch=1)
    story.says(AgentsLost(launch=2, nodes=["n4"], reason="no answer", cause=LossCause.NOT_STARTED))
    assert story.does(NodesAdmitted) == NodesAdmitted(nodes=["n1", "n2", "n3"])
    for index, pairs in enumerate((["n1", "n2", "n3"], ["n2", "n3", "n1"], ["n3", "n1", "n2"])):
        story.does(RoundStarted)
        story.says(*measured(*pairs, index=index))
        story.does(RoundEnded)
    assert story.verdict()["n4"] == (Level.FAULTY, "Slurm cannot start a step there: no answer")


def test_a_job_that_has_ended_leaves_every_node_undecided_and_nothing_is_started_again() -> None:
    story = Story()
    story.is_in_round()
    story.says(*(AgentsLost(launch=0, nodes=[node], reason="killed") for node in NODES))
    story.does(RoundEnded)
    story.relaunches()
    ended = "Slurm job 1 has expired"
    story.says(AgentsLost(launch=1, nodes=[*NODES], reason=ended, cause=LossCause.JOB_ENDED))

    while not isinstance(record := story.writes(), VerdictReached):
        assert not isinstance(record, AgentsLaunched)
    assert {node.level for node in record.nodes} == {Level.INCONCLUSIVE}


def test_a_second_round_with_nothing_in_doubt_measures_only_what_pairs_do_together() -> None:
    story = Story()
    story.controller = Controller(NODES, make_localizer, LIMITS, phases(["quick"]))
    story.begins()

    used = []
    for index in range(2):
        begun = story.does(RoundStarted)
        used.append([probe.name for probe in begun.probes])
        story.says(*measured(*NODES, index=index))
        story.does(RoundEnded)

    assert used == [["matmul", "allgather"], ["allgather"]]
    story.does(VerdictReached)


@pytest.mark.parametrize(
    ("news", "reason"),
    [
        (
            NodeReported(node="n2", round=0, outcome=Outcome.FAILED, detail="no memory"),
            "n2 reports: no memory",
        ),
        (AgentsLost(launch=0, nodes=["n2"], reason="killed"), "n2 is gone: killed"),
    ],
)
def test_when_one_member_fails_or_its_agent_dies_the_others_are_told_at_once(
    news: Record, reason: str
) -> None:
    story = Story()
    story.is_in_round()
    story.says(news)

    assert story.does(GroupAborted) == GroupAborted(
        round=0, group=["n1", "n2"], reason=reason, timed_out=False
    )


def test_a_node_lost_between_rounds_is_absent_and_its_partner_not_to_blame() -> None:
    story = Story(limits=TimeLimits(launches_per_node=1))
    story.is_in_round()
    story.says(*measured(*NODES))
    story.does(RoundEnded)
    story.says(AgentsLost(launch=0, nodes=["n2"], reason="killed"))

    begun = story.does(RoundStarted)

    assert begun.groups == [["n2", "n3"], ["n4", "n1"]]
    assert begun.absent == ["n2"]
    assert begun.rendezvous[0].port == 0
    story.says(*measured("n4", "n1", index=1))
    assert story.does(RoundEnded) == RoundEnded(round=1, silent=["n2"])
    results = story.controller.state.ended[-1]
    assert [(r.outcome, r.silent) for r in results] == [
        (Outcome.NOT_RUN, ("n2",)),
        (Outcome.MEASURED, ()),
    ]


def test_all_rounds_of_a_phase_train_one_model_whichever_nodes_they_have() -> None:
    free_bytes = {"n1": 79_000_000_000, "n2": 79_000_000_000, "n3": 45_000_000_000}
    story = Story(list(free_bytes))
    story.controller = Controller(list(free_bytes), make_localizer, LIMITS, phases(["gpt"])[1:])
    story.does(AgentsLaunched)
    for node, free in free_bytes.items():
        on_gpu = replace(ready(node), backend="nccl", devices=["H100"], free_bytes=free)
        story.says(started(node), on_gpu)
    story.does(NodesAdmitted)
    models, met = set(), []
    for index in range(3):
        begun = story.does(RoundStarted)
        met.append({node for group in begun.groups for node in group})
        models.add(tuple((name, value) for name, value in begun.options.items() if "gpt" in name))
        story.says(*measured(*met[-1], index=index))
        story.does(RoundEnded)

    assert {"n1", "n2"} in met
    assert len(models) == 1


@rows
def test_nvlink_domains_are_leaves_where_slurm_knows_no_switches(
    leaves: Sequence[str], domains: Sequence[str], found: dict[str, list[str]]
) -> None:
    story = Story()
    story.does(AgentsLaunched)
    for node, leaf, domain in zip(NODES, leaves, domains, strict=True):
        story.says(started(node, leaf=leaf), replace(ready(node), nvlink_domain=domain))

    admitted = story.does(NodesAdmitted)

    assert admitted.leaves == found


@pytest.mark.parametrize(("connecting", "options"), [(True, {"apart": 1}), (False, {})])
def test_devices_are_connected_apart_only_after_nccl_has_hung_in_that(
    connecting: bool, options: dict[str, int]
) -> None:
    """A kernel that never ended would take the longer time of such a round as well."""
    story = Story(["n1", "n2"], course=phases(["values"]))
    story.begins(backend="nccl")
    story.does(RoundStarted)
    story.says(*measured("n1"))
    story.does(GroupAborted, at_s=START_S + LIMITS.round_deadline_s)
    late = NodeReported(node="n2", round=0, outcome=Outcome.TIMED_OUT, connecting=connecting)
    story.says(late)
    story.does(RoundEnded)

    again = story.does(RoundStarted)

    assert {name: value for name, value in again.options.items() if name == "apart"} == options


def test_the_verdict_waits_for_the_test_of_storage_and_no_longer_than_that_may_take() -> None:
    story = Story(NODES[:2], course=phases(["storage"]))
    story.says(replace(accusing.started(), settings={"paths": "/ckpt"}))
    story.begins()
    begun = story.does(RoundStarted)
    assert begun.options[STORAGE_PATHS] == "/ckpt"
    assert begun.options[STORAGE_NODES] == "n[1-2]"
    story.says(StorageTested(node="n1", path="/ckpt", status="ok"))
    story.says(*measured(*NODES[:2]))
    while not isinstance(step := story.next(), Wait):  # the rounds go on meanwhile
        story.says(step[0])
        if isinstance(step[0], RoundStarted):
            assert STORAGE_NODES not in step[0].options
            story.says(*measured(*NODES[:2], index=step[0].round))
    assert step.reason == "storage of 1 node"
    assert story.next(at_s=step.until_s - 0.1) == step
    verdict = story.does(VerdictReached, at_s=step.until_s)
    assert [node.level for node in verdict.nodes] == [Level.HEALTHY] * 2
    assert verdict.storage == []


ECC = "device 3: CUDA error: uncorrectable ECC error encountered"


def ends(story: Story, *nodes: str) -> dict[str, tuple[Level, str]]:
    """Let these nodes pass all rounds; return what is concluded about all."""
    while not isinstance(record := story.writes(), VerdictReached):
        if isinstance(record, RoundStarted):
            story.says(*measured(*nodes, index=record.round))
    return {node.node: (node.level, node.reason) for node in record.nodes}


@rows
def test_a_device_that_failed_twice_is_the_nodes_fault_unless_the_softwares_it_may_be(
    failing: list[str], torch: str, level: Level, reason: str
) -> None:
    story = Story()
    story.does(AgentsLaunched)
    well = [node for node in NODES if node not in failing]
    story.is_ready(*well)
    for node in failing:
        failed = WorkersFailed(node=node, launch=0, reason=ECC, device_failed=True, torch=torch)
        story.says(started(node), failed)

    concluded = ends(story, *well)

    assert {concluded[node] for node in failing} == {(level, reason)}


@rows
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


@rows
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
