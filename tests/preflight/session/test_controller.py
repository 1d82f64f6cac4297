# SPDX-License-Identifier: Apache-2.0
"""What the master does next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest
from msgspec.structs import replace

from slurm_health.preflight.localize.settings import USUAL, DeviceKind, LocalizeSettings
from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.session.controller import Controller, Wait
from slurm_health.preflight.session.course import RoundPlanner
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.phases import phases
from slurm_health.preflight.session.storage import STORAGE_NODES, STORAGE_PATHS
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import (
    AgentsLaunched,
    AgentsLost,
    GroupAborted,
    LossCause,
    NodeReported,
    NodesAdmitted,
    Record,
    RoundEnded,
    RoundStarted,
    StorageTested,
    VerdictReached,
)
from slurm_health.records.verdict import Level, Outcome
from tests.support import accusing
from tests.support.session_story import LIMITS, NODES, START_S, Story, measured, ready, started


def test_as_soon_as_all_are_ready_the_first_round_begins_at_the_first_members_store() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.is_ready(*NODES)

    assert story.does(NodesAdmitted) == NodesAdmitted(nodes=list(NODES))
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
    story.does(AgentsLaunched)
    story.is_ready(*NODES)
    story.does(NodesAdmitted)

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


@pytest.mark.parametrize(
    ("backend", "kind"), [("gloo", DeviceKind.CPU), ("nccl", DeviceKind.ACCELERATOR)]
)
def test_the_localizer_is_told_what_is_usual_for_the_devices_and_what_was_chosen(
    backend: str, kind: DeviceKind
) -> None:
    made: list[LocalizeSettings] = []

    def make(
        nodes: Sequence[str], leaves: Mapping[str, Sequence[str]] | None, chosen: LocalizeSettings
    ) -> RoundPlanner:
        made.append(chosen)
        return make_localizer(nodes, leaves, chosen)

    chosen = {"min_rounds": 3, "expected_ms": {"allgather": 50}}
    controller = Controller(NODES, make, LIMITS, phases(["allgather"]), localize_options=chosen)
    records: list[Record] = [AgentsLaunched(launch=0, nodes=list(NODES))]
    for node in NODES:
        records += [started(node), msgspec.structs.replace(ready(node), backend=backend)]
    for record in (*records, NodesAdmitted(nodes=list(NODES))):
        controller.state.fold(Entry(id="", time_s=START_S, kind="", record=record))
    controller.next_step(START_S)

    (settings_made,) = made
    assert settings_made.network_floor == USUAL[kind].network_floor
    assert settings_made.noise == USUAL[kind].noise
    assert settings_made.min_rounds == 3
    assert settings_made.expected_ms == {"allgather": 50.0}


@pytest.mark.parametrize(
    ("leaves", "domains", "found"),
    [
        # A rack of GB200 each, and Slurm knows no switch.
        (("", "", "", ""), ("r1", "r1", "r2", "r2"), {"r1": ["n1", "n2"], "r2": ["n3", "n4"]}),
        # What Slurm knows is of the network itself.
        (
            ("s1", "s2", "s1", "s2"),
            ("r1", "r1", "r2", "r2"),
            {"s1": ["n1", "n3"], "s2": ["n2", "n4"]},
        ),
        # One domain tells nothing apart, and a node without one might be anywhere.
        (("", "", "", ""), ("r1", "r1", "r1", "r1"), {}),
        (("", "", "", ""), ("r1", "r1", "r2", ""), {}),
        (("s1", "", "s1", "s2"), ("", "", "", ""), {}),
    ],
)
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
    story.does(AgentsLaunched)
    for node in ("n1", "n2"):
        story.says(started(node), replace(ready(node), backend="nccl"))
    story.does(NodesAdmitted)
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
    story.does(AgentsLaunched)
    story.is_ready(*NODES[:2])
    story.does(NodesAdmitted)
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
