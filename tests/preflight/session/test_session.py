# SPDX-License-Identifier: Apache-2.0
"""What the master does next, and that every check comes to an end whatever happens in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_health.preflight.localize.settings import USUAL, Device, LocalizeSettings
from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.session.deadlines import Limits
from slurm_health.preflight.session.phase_runner import Localizer
from slurm_health.preflight.session.phases import phases
from slurm_health.preflight.session.session import Abort, Append, Conclude, Session, Wait
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import (
    AgentsLaunched,
    AgentsLost,
    DevicesUnopened,
    GroupAborted,
    LossCause,
    MasterResumed,
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
from tests.support.session_story import (
    LIMITS,
    NODES,
    START_S,
    Story,
    measured,
    names,
    ready,
    started,
)
from tests.support.world import World

many = settings(max_examples=100)
BLIND_S = LIMITS.round_deadline_s / 2  # these nodes load torch within a second


# --- any world ---------------------------------------------------------------------------------


@many
@given(
    st.integers(1, 6),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.lists(st.integers(1, 40), max_size=3),
)
def test_every_check_ends_and_a_new_reader_comes_to_the_same_verdict(
    count: int, seed: int, trouble: float, deaths: list[int]
) -> None:
    world = World(names(count), Random(seed), trouble=trouble, limits=LIMITS)

    session = world.play(die_after=deaths)

    verdict = session.state.verdict
    assert verdict is not None
    assert [node.node for node in verdict.nodes] == list(world.nodes)
    again = world.replayed()
    assert again.next_step(world.now_s) == Conclude()
    assert again.state.ended == session.state.ended
    assert again.state.verdict == verdict


@many
@given(
    st.integers(1, 6),
    st.integers(0, 2**32),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.lists(st.integers(1, 40), max_size=2),
)
def test_what_is_concluded_follows_from_the_journal_alone(
    count: int, seed: int, trouble: float, deaths: list[int]
) -> None:
    world = World(names(count), Random(seed), trouble=trouble, limits=LIMITS)
    verdict = world.play(die_after=deaths).state.verdict
    undecided = world.replayed(without=VerdictReached)

    step = undecided.next_step(world.now_s)

    assert verdict is not None
    assert step == Append(record=verdict)


@settings(max_examples=20)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(5, 40), max_size=2),
    st.sampled_from(["quick", "standard", "thorough"]),
)
def test_the_real_localizer_is_never_given_what_it_did_not_plan(
    seed: int, deaths: list[int], check: str
) -> None:
    world = World(
        names(5),
        Random(seed),
        trouble=0.4,
        limits=LIMITS,
        make_localizer=make_localizer,
        course=phases([check]),
    )

    session = world.play(die_after=deaths)

    assert session.state.verdict is not None


@pytest.mark.parametrize("death", range(1, 30))
def test_a_master_may_die_at_any_step_of_an_untroubled_check(death: int) -> None:
    world = World(NODES, Random(0), trouble=0.0, limits=LIMITS)

    verdict = world.play(die_after=[death]).state.verdict

    assert verdict is not None
    assert {node.level for node in verdict.nodes} <= {Level.HEALTHY, Level.INCONCLUSIVE}


@pytest.mark.parametrize("trouble", [0.0, 0.5])
def test_a_master_killed_on_any_write_is_gone_on_for_and_nothing_is_done_twice(
    trouble: float,
) -> None:
    untroubled = World(names(4), Random(1), trouble=trouble, limits=LIMITS)
    untroubled.play()

    for killed_at in range(2, len(untroubled.master_log) + 1):
        # The third one dies again, where the second one has just begun.
        world = World(names(4), Random(1), trouble=trouble, limits=LIMITS)
        world.play(killed_at=[killed_at, killed_at + 2])

        written = [entry.record for entry in world.master_log]
        launches = [each.launch for each in written if isinstance(each, AgentsLaunched)]
        rounds = [each.round for each in written if isinstance(each, RoundStarted)]
        ended = [each.round for each in written if isinstance(each, RoundEnded)]
        assert launches == list(range(len(launches)))
        assert rounds == ended == list(range(len(rounds)))
        assert sum(isinstance(each, NodesAdmitted) for each in written) <= 1
        assert isinstance(written[-1], VerdictReached)
        assert sum(isinstance(each, VerdictReached) for each in written) == 1


@many
@given(st.integers(0, 2**32))
def test_no_node_is_launched_more_often_than_allowed(seed: int) -> None:
    world = World(names(4), Random(seed), trouble=1.0, limits=LIMITS)

    world.play()

    launched = [
        node
        for entry in world.master_log
        if isinstance(entry.record, AgentsLaunched)
        for node in entry.record.nodes
    ]
    assert all(launched.count(node) <= LIMITS.launches_per_node for node in world.nodes)


# --- one thing at a time -----------------------------------------------------------------------


def test_all_agents_are_launched_at_once_and_then_waited_for() -> None:
    story = Story()

    assert story.does(AgentsLaunched) == AgentsLaunched(launch=0, nodes=list(NODES))
    assert isinstance(story.next(), Wait)


def test_as_soon_as_all_are_ready_the_first_round_begins_at_the_first_members_store() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.is_ready(*NODES)

    assert story.does(NodesAdmitted) == NodesAdmitted(nodes=list(NODES))
    begun = story.does(RoundStarted)
    assert isinstance(begun, RoundStarted)
    assert begun.groups == [["n1", "n2"], ["n3", "n4"]]
    assert [(meet.address, meet.port) for meet in begun.rendezvous] == [
        ("10.0.0.1", 4000),
        ("10.0.0.3", 4000),
    ]
    assert begun.absent == []


def test_a_node_whose_workers_fail_is_left_out_with_their_words() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.is_ready("n1", "n2", "n3")
    story.says(started("n4"), WorkersFailed(node="n4", launch=0, reason="no module named torch"))

    assert story.does(NodesAdmitted) == NodesAdmitted(nodes=["n1", "n2", "n3"])


ECC = "device 3: CUDA error: uncorrectable ECC error encountered"


def device_failed(node: str, torch: str = "2.4") -> list[Record]:
    failed = WorkersFailed(node=node, launch=0, reason=ECC, device_failed=True, torch=torch)
    return [started(node), failed]


def ends(story: Story, *nodes: str) -> dict[str, tuple[Level, str]]:
    """Let these nodes pass all rounds; return what is concluded about all."""
    while not isinstance(step := story.next(), Append) or not isinstance(
        step.record, VerdictReached
    ):
        assert isinstance(step, Append), step
        story.says(step.record)
        if isinstance(step.record, RoundStarted):
            story.says(*measured(*nodes, index=step.record.round))
    return story.verdict()


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
    assert story.next() == Conclude()


def test_where_nothing_is_heard_of_any_agent_the_check_ends_undecided() -> None:
    story = Story()
    story.does(AgentsLaunched)

    waiting = story.next()
    assert isinstance(waiting, Wait)
    assert waiting.until_s == START_S + LIMITS.start_s
    story.now_s = waiting.until_s
    assert {level for level, _ in story.verdict().values()} == {Level.INCONCLUSIVE}


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


def test_a_lost_agent_is_launched_again_alone() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.is_ready("n1", "n2", "n3")
    story.says(AgentsLost(launch=0, nodes=["n4"], reason="killed"))

    assert story.relaunches() == AgentsLaunched(launch=1, nodes=["n4"])


def test_losses_that_follow_each_other_closely_are_launched_again_together() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.says(AgentsLost(launch=0, nodes=["n1"], reason="killed"))
    story.says(AgentsLost(launch=0, nodes=["n2"], reason="killed"), at_s=START_S + 0.2)

    waiting = story.next()

    assert isinstance(waiting, Wait)
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


def test_an_agent_that_sees_no_journal_is_not_started_again_and_its_node_not_to_blame() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.is_ready("n1", "n2", "n3")
    blind = "does not see the master's journal"
    story.says(AgentsLost(launch=0, nodes=["n4"], reason=blind, cause=LossCause.NO_JOURNAL))

    assert story.does(NodesAdmitted) == NodesAdmitted(nodes=["n1", "n2", "n3"])
    assert story.session.state.agents["n4"].no_journal
    assert story.session.state.agents["n4"].failed == blind


def test_a_job_that_has_ended_leaves_every_node_undecided_and_nothing_is_started_again() -> None:
    story = Story()
    story.is_in_round()
    story.says(*(AgentsLost(launch=0, nodes=[node], reason="killed") for node in NODES))
    story.does(RoundEnded)
    story.relaunches()
    ended = "Slurm job 1 has expired"
    story.says(AgentsLost(launch=1, nodes=[*NODES], reason=ended, cause=LossCause.JOB_ENDED))

    while not isinstance(step := story.next(), Append) or not isinstance(
        step.record, VerdictReached
    ):
        assert isinstance(step, Append)
        assert not isinstance(step.record, AgentsLaunched)
        story.says(step.record)
    assert {node.level for node in step.record.nodes} == {Level.INCONCLUSIVE}


def test_a_late_word_of_an_agent_that_was_replaced_counts_for_nothing() -> None:
    story = Story(["n1"])
    story.does(AgentsLaunched)
    story.says(AgentsLost(launch=0, nodes=["n1"], reason="killed"))
    story.relaunches()

    story.is_ready("n1", launch=0)

    assert isinstance(story.next(), Wait)


def test_a_round_ends_when_all_have_reported() -> None:
    story = Story()
    story.is_in_round()
    story.says(*measured(*NODES))

    assert story.does(RoundEnded) == RoundEnded(round=0)


def test_a_second_round_with_nothing_in_doubt_measures_only_what_pairs_do_together() -> None:
    story = Story()
    story.session = Session(NODES, make_localizer, LIMITS, phases(["quick"]))
    story.does(AgentsLaunched)
    story.is_ready(*NODES)
    story.does(NodesAdmitted)

    used = []
    for index in range(2):
        begun = story.does(RoundStarted)
        assert isinstance(begun, RoundStarted)
        used.append([probe.name for probe in begun.probes])
        story.says(*measured(*NODES, index=index))
        story.does(RoundEnded)

    assert used == [["matmul", "allgather"], ["allgather"]]
    assert isinstance(story.next(), Append)


def test_when_one_member_fails_the_others_are_told_at_once() -> None:
    story = Story()
    story.is_in_round()
    story.says(NodeReported(node="n1", round=0, outcome=Outcome.FAILED, detail="no memory"))

    aborted = story.does(GroupAborted)

    assert aborted == GroupAborted(
        round=0, group=["n1", "n2"], reason="n1 reports: no memory", timed_out=False
    )


def test_when_one_members_agent_dies_the_others_are_told_at_once() -> None:
    story = Story()
    story.is_in_round()
    story.says(AgentsLost(launch=0, nodes=["n2"], reason="killed"))

    aborted = story.does(GroupAborted)

    assert isinstance(aborted, GroupAborted)
    assert (aborted.group, aborted.reason) == (["n1", "n2"], "n2 is gone: killed")


def test_a_group_that_says_nothing_is_stopped_at_the_deadline_and_then_waited_for_briefly() -> None:
    story = Story()
    story.is_in_round()
    assert isinstance(story.next(START_S + BLIND_S - 0.1), Wait)

    for _ in range(2):
        aborted = story.does(GroupAborted, at_s=START_S + BLIND_S)
        assert isinstance(aborted, GroupAborted)
        assert aborted.timed_out

    waiting = story.next()
    give_up_s = START_S + BLIND_S + LIMITS.abort_grace_s
    assert waiting == Wait(until_s=give_up_s, reason="round 0 (pair): 0 of 2 groups done")
    ended = story.does(RoundEnded, at_s=give_up_s)
    assert ended == RoundEnded(round=0, silent=list(NODES))


def test_all_groups_whose_time_is_over_are_stopped_with_one_write() -> None:
    story = Story()
    story.is_in_round()

    step = story.next(START_S + LIMITS.round_deadline_s)

    assert isinstance(step, Abort)
    assert [record.group for record in step.records] == [["n1", "n2"], ["n3", "n4"]]


def test_a_thorough_round_of_gpus_may_take_as_long_as_what_it_does() -> None:
    story = Story(course=phases(["thorough"]))
    story.does(AgentsLaunched)
    for node in NODES:
        gpus = msgspec.structs.replace(
            ready(node, devices=8), backend="nccl", ports_gbit_per_s=[400.0] * 8
        )
        story.says(started(node), gpus)
    story.does(NodesAdmitted)

    begun = story.does(RoundStarted)

    assert isinstance(begun, RoundStarted)
    burn_s, adapters_s = 3 + 8, 2 * 12
    assert begun.deadline_s == BLIND_S + LIMITS.patience * (burn_s + adapters_s)
    assert isinstance(story.next(START_S + begun.deadline_s - 0.1), Wait)
    assert isinstance(story.next(START_S + begun.deadline_s), Abort)


def test_once_half_of_a_round_has_reported_the_rest_gets_a_short_deadline() -> None:
    story = Story()
    story.is_in_round()
    story.says(*measured("n1", "n2", took_ms=1000.0), at_s=START_S + 1.0)

    waiting = story.next()

    assert isinstance(waiting, Wait)
    assert waiting.until_s == START_S + LIMITS.adaptive_factor * 1.0 + LIMITS.least_margin_s


@pytest.mark.parametrize(
    ("start_ms", "margin_s", "blind_s"),
    [(1e3, 2.0, 30.0), (4e3, 4.0, 50.0), (2e4, 6.0, 60.0), (2e5, 6.0, 60.0)],
)
def test_machines_that_loaded_torch_quickly_get_shorter_deadlines(
    start_ms: float, margin_s: float, blind_s: float
) -> None:
    story = Story()
    story.does(AgentsLaunched)
    for node in NODES:
        story.says(started(node), msgspec.structs.replace(ready(node), start_ms=start_ms))
    story.does(NodesAdmitted)

    begun = story.does(RoundStarted)

    assert isinstance(begun, RoundStarted)
    assert begun.deadline_s == blind_s
    story.says(*measured("n1", "n2", took_ms=1000.0), at_s=START_S + 1.0)
    waiting = story.next()
    assert isinstance(waiting, Wait)
    assert waiting.until_s == START_S + LIMITS.adaptive_factor * 1.0 + margin_s


def test_a_node_that_did_not_come_back_in_time_is_not_waited_for_again() -> None:
    story = Story()
    story.is_in_round()
    story.says(WorkersStarting(node="n4", launch=0), *measured(*NODES))
    story.does(RoundEnded)
    waiting = story.next()
    assert isinstance(waiting, Wait)
    begun = story.does(RoundStarted, at_s=waiting.until_s)
    assert isinstance(begun, RoundStarted)
    assert begun.absent == ["n4"]
    story.says(*measured(*NODES[:3], index=1))
    story.does(RoundEnded)

    again = story.does(RoundStarted)

    assert isinstance(again, RoundStarted)
    assert again.absent == ["n4"]


def test_a_node_that_came_back_and_starts_anew_is_waited_for_as_long_as_the_first_time() -> None:
    story = Story()
    story.is_in_round()
    story.says(WorkersStarting(node="n4", launch=0), *measured(*NODES))
    story.does(RoundEnded)
    first = story.next()
    assert isinstance(first, Wait)
    story.says(ready("n4"), at_s=first.until_s - 1.0)
    story.does(RoundStarted)
    story.says(WorkersStarting(node="n4", launch=0), *measured(*NODES, index=1))
    story.does(RoundEnded)

    second = story.next()

    assert isinstance(second, Wait)
    assert second.until_s - story.now_s == first.until_s - START_S


def test_a_round_in_which_nobody_has_reported_yet_gets_more_patience() -> None:
    story = Story()
    story.is_in_round()
    story.says(*measured(*NODES, took_ms=1000.0))
    story.does(RoundEnded)
    story.does(RoundStarted)

    waiting = story.next()

    assert isinstance(waiting, Wait)
    usual_s = LIMITS.adaptive_factor * 1.0 + LIMITS.least_margin_s
    assert waiting.until_s == START_S + usual_s * LIMITS.patience


def test_a_round_after_one_that_a_deadline_ended_gets_no_such_patience_again() -> None:
    story = Story()
    story.is_in_round()
    story.says(*measured("n1", "n2", took_ms=1000.0))
    story.does(GroupAborted, at_s=START_S + BLIND_S)
    late = [
        NodeReported(node=node, round=0, outcome=Outcome.TIMED_OUT, elapsed_ms=BLIND_S * 1e3)
        for node in ("n3", "n4")
    ]
    story.says(*late)
    story.does(RoundEnded)
    story.does(RoundStarted)

    waiting = story.next()

    assert isinstance(waiting, Wait)
    usual_s = LIMITS.adaptive_factor * 1.0 + LIMITS.least_margin_s
    assert waiting.until_s == story.now_s + usual_s


def test_a_node_lost_between_rounds_is_absent_and_its_partner_not_to_blame() -> None:
    story = Story(limits=Limits(launches_per_node=1))
    story.is_in_round()
    story.says(*measured(*NODES))
    story.does(RoundEnded)
    story.says(AgentsLost(launch=0, nodes=["n2"], reason="killed"))

    begun = story.does(RoundStarted)

    assert isinstance(begun, RoundStarted)
    assert begun.groups == [["n2", "n3"], ["n4", "n1"]]
    assert begun.absent == ["n2"]
    assert begun.rendezvous[0].port == 0
    story.says(*measured("n4", "n1", index=1))
    assert story.does(RoundEnded) == RoundEnded(round=1, silent=["n2"])
    _, results = story.session.state.ended[-1]
    assert [(r.outcome, r.silent) for r in results] == [
        (Outcome.NOT_RUN, ("n2",)),
        (Outcome.MEASURED, ()),
    ]


def test_a_new_master_voids_the_round_it_finds_and_launches_everybody_again() -> None:
    story = Story()
    story.is_in_round()
    story.says(MasterResumed(pid=7))

    assert story.does(RoundEnded) == RoundEnded(round=0, void=True)
    assert story.does(AgentsLaunched) == AgentsLaunched(launch=1, nodes=list(NODES))
    assert [r.outcome for _, results in story.session.state.ended for r in results] == [
        Outcome.NOT_RUN,
        Outcome.NOT_RUN,
    ]


def test_a_new_master_keeps_what_is_known_of_a_node_that_was_left_out() -> None:
    story = Story()
    story.does(AgentsLaunched)
    story.is_ready("n1", "n2", "n3")
    story.is_ready("n4", torch="1.13")
    story.does(NodesAdmitted)
    story.says(MasterResumed(pid=7))
    story.does(AgentsLaunched)
    story.is_ready("n1", "n2", "n3", launch=1)
    story.measures("n1", "n2", "n3", rounds=3)

    level, reason = story.verdict()["n4"]

    assert level is Level.INCONCLUSIVE
    assert "torch 1.13 with gloo on 1 device there, unlike the other nodes" in reason


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


def test_no_node_is_given_up_while_others_still_get_ready() -> None:
    """So it is where agents start one after the other, and each loads torch within a second."""
    story = Story()
    story.does(AgentsLaunched)
    story.now_s += LIMITS.ready_extra_s + 15.0
    story.is_ready("n1", "n2", "n3")
    story.says(started("n4"))

    step = story.session.next_step(story.now_s)
    assert step == Wait(until_s=story.now_s + LIMITS.next_ready_s, reason="1 nodes to get ready")

    story.does(NodesAdmitted, at_s=story.now_s + LIMITS.next_ready_s)


@pytest.mark.parametrize(("backend", "kind"), [("gloo", Device.CPU), ("nccl", Device.ACCELERATOR)])
def test_the_localizer_is_told_what_is_usual_for_the_devices_and_what_was_chosen(
    backend: str, kind: Device
) -> None:
    made: list[LocalizeSettings] = []

    def make(
        nodes: Sequence[str], leaves: Mapping[str, Sequence[str]] | None, chosen: LocalizeSettings
    ) -> Localizer:
        made.append(chosen)
        return make_localizer(nodes, leaves, chosen)

    chosen = {"min_rounds": "3", "expected_ms": "allgather=50"}
    session = Session(NODES, make, LIMITS, phases(["allgather"]), localize_options=chosen)
    records: list[Record] = [AgentsLaunched(launch=0, nodes=list(NODES))]
    for node in NODES:
        records += [started(node), msgspec.structs.replace(ready(node), backend=backend)]
    for record in (*records, NodesAdmitted(nodes=list(NODES))):
        session.state.fold(Entry(id="", time_s=START_S, kind="", record=record))
    session.next_step(START_S)

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

    assert isinstance(admitted, NodesAdmitted)
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

    assert isinstance(again, RoundStarted)
    assert {name: value for name, value in again.options.items() if name == "apart"} == options
