# SPDX-License-Identifier: Apache-2.0
"""What follows a failed script: by evidence, and by a check where that decides nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from slurm_health.preflight.decide.after_failure import (
    Next,
    ScriptFailure,
    check_again,
    plan,
)
from slurm_health.records.script_records import Attribution, Diagnosed, EventKind, TrainingEvent

FAILURE = ScriptFailure(diagnosed=None, batch_node="n1", nodes=("n1", "n2", "n3"))
WITH_SPARE = replace(FAILURE, spares=("n4",), least=3)
LOST = (("n2", "Slurm took n2 out of the job; it is DOWN*"),)


def found(attribution: Attribution, *accused: str, sureness: str = "likely") -> Diagnosed:
    return Diagnosed(
        cause="a-cause",
        description="something broke",
        attribution=attribution.value,
        sureness=sureness,
        accused=list(accused),
        evidence=["a line"],
    )


@pytest.mark.parametrize("sureness", ["possible", "likely", "certain"])
def test_a_users_error_stops_the_job_and_accuses_no_node(sureness: str) -> None:
    failure = replace(FAILURE, diagnosed=found(Attribution.USER, sureness=sureness))

    decided = plan(failure)

    assert (decided.next, decided.at_fault, decided.check) == (Next.STOP, (), ())
    assert "something broke (user error)" in decided.reason
    assert decided.evidence == ("a line",)


def test_a_lost_node_is_left_for_a_spare_that_is_checked_first() -> None:
    decided = plan(replace(WITH_SPARE, lost=LOST))

    assert (decided.next, decided.check) == (Next.CHECK, ("n1", "n3", "n4"))
    assert [each.node for each in decided.at_fault] == ["n2"]
    assert LOST[0][1] in decided.evidence


@pytest.mark.parametrize(
    "failure",
    [
        replace(FAILURE, lost=LOST),  # no spare was asked for
        replace(WITH_SPARE, lost=(*LOST, ("n3", "it is DOWN"))),  # more were lost than there are
        replace(WITH_SPARE, diagnosed=found(Attribution.NODE, "n1")),  # the batch host
    ],
)
def test_a_job_that_cannot_go_on_without_a_node_leaves_it(failure: ScriptFailure) -> None:
    decided = plan(failure)

    assert decided.next is Next.LEAVE
    assert decided.at_fault


@given(
    st.builds(
        ScriptFailure,
        diagnosed=st.none()
        | st.builds(
            found,
            st.sampled_from(Attribution),
            st.sampled_from(["n1", "n2", "n4"]),
            sureness=st.sampled_from(["possible", "likely"]),
        ),
        job_over=st.sampled_from(["", "TIMEOUT"]),
        batch_node=st.just("n1"),
        nodes=st.just(("n1", "n2", "n3")),
        spares=st.sampled_from([(), ("n4",)]),
        lost=st.sampled_from([(), LOST]),
        restarted_unchecked=st.booleans(),
        least=st.none() | st.integers(1, 4),
    )
)
def test_every_plan_says_why_and_checks_no_node_that_it_holds_at_fault(
    failure: ScriptFailure,
) -> None:
    decided = plan(failure)

    assert decided.reason
    guilty = {verdict.node for verdict in decided.at_fault}
    assert guilty.isdisjoint(decided.check)
    assert all(verdict.evidence for verdict in decided.at_fault)
    accused = set(failure.diagnosed.accused if failure.diagnosed else ())
    assert guilty <= accused | {node for node, _ in failure.lost}
    if failure.job_over:
        assert decided.next is Next.STOP
    if decided.next is Next.CHECK:
        assert "n1" in decided.check


# --- hangs for which the monitor had the script ended ---------------------------------------------


def hang(cause: str = "rank-stopped", sureness: str = "certain", node: str = "n2") -> TrainingEvent:
    where = Diagnosed(
        cause=cause,
        description="rank 1 keeps the others waiting",
        attribution="undecided",
        sureness=sureness,
        nodes=[node] if node else [],
        ranks=[1] if node else [],
    )
    return TrainingEvent(
        event=EventKind.HANG,
        stalled_s=40.0,
        usual_s=25.0,
        step=7,
        nodes=where.nodes,
        ranks=where.ranks,
        diagnosed=where,
    )


HUNG = replace(WITH_SPARE, diagnosed=found(Attribution.UNDECIDED), hang=hang())


def test_after_a_hang_all_nodes_are_checked_and_its_place_is_the_last_choice() -> None:
    decided = plan(HUNG)

    assert (decided.next, decided.at_fault) == (Next.CHECK, ())
    assert decided.check == ("n1", "n2", "n3", "n4")
    assert decided.last_choice == ("n2",)
    assert "rank 1 keeps the others waiting" in decided.reason


def test_a_hang_that_ended_as_if_in_passing_is_checked_as_every_hang_is() -> None:
    passing = replace(HUNG, diagnosed=found(Attribution.TRANSIENT))

    assert plan(passing).next is Next.CHECK
    assert plan(passing).last_choice == ("n2",)


def test_a_hang_on_half_of_the_nodes_makes_these_the_last_choice() -> None:
    half = hang()
    half.nodes[:] = ["n1", "n2"]

    assert plan(replace(HUNG, nodes=("n1", "n2", "n3", "n4"), hang=half)).last_choice == (
        "n1",
        "n2",
    )


def test_one_kind_of_hang_is_restarted_twice() -> None:
    assert plan(replace(HUNG, hangs_before=(hang(),))).next is Next.CHECK
    third = plan(replace(HUNG, hangs_before=(hang(), hang(node="n3"))))
    assert third.next is Next.STOP
    assert "2 times after such a hang (rank-stopped)" in third.reason
    other = (hang("rank-gone"), hang("checkpoint-stuck"))
    assert plan(replace(HUNG, hangs_before=other)).next is Next.CHECK


@pytest.mark.parametrize("cause", ["rank-elsewhere", "data-loader-stuck", "rank-out-of-step"])
def test_a_hang_in_the_scripts_own_code_or_data_is_not_restarted(cause: str) -> None:
    inside = hang(cause, "likely")

    assert plan(replace(HUNG, hang=inside)).next is Next.STOP
    beyond = structs.replace(inside, beyond_script=True)
    assert plan(replace(HUNG, hang=beyond)).next is Next.CHECK


# --- which check precedes a restart -------------------------------------------------------------


def test_a_check_of_minutes_is_not_made_again_and_that_is_said() -> None:
    found = check_again("thorough", 312.4, quick="network-check")

    assert found.check == "network-check"
    assert found.less == "thorough took 312 s before, and a restart waits 120 s at most"


def test_a_check_without_a_verdict_is_not_tried_again() -> None:
    found = check_again("standard", None)

    assert (found.check, found.less) == ("quick", "standard came to no verdict before")


@pytest.mark.parametrize(("took_s", "check"), [(120.0, "thorough"), (121.0, "quick")])
def test_a_restart_waits_two_minutes_for_a_check_and_no_longer(took_s: float, check: str) -> None:
    assert check_again("thorough", took_s).check == check


def undecided(rank: int = 1, node: str = "n2", cause: str = "crashed") -> Diagnosed:
    return Diagnosed(
        cause=cause,
        description="it crashed",
        attribution=Attribution.UNDECIDED.value,
        sureness="likely",
        nodes=[node],
        ranks=[rank],
        evidence=[f"srun: error: {node}: task {rank}: Segmentation fault"],
    )


def test_the_same_words_undecided_twice_are_not_started_a_third_time() -> None:
    now = undecided(rank=3, node="n3")
    once = plan(ScriptFailure(diagnosed=now, batch_node="n1", nodes=("n1", "n2", "n3")))
    twice = plan(
        ScriptFailure(
            diagnosed=now, batch_node="n1", nodes=("n1", "n2", "n3"), before=(undecided(),)
        )
    )
    other = plan(
        ScriptFailure(
            diagnosed=now,
            batch_node="n1",
            nodes=("n1", "n2", "n3"),
            before=(undecided(cause="killed"),),
        )
    )

    assert (once.next, twice.next, other.next) == (Next.CHECK, Next.STOP, Next.CHECK)


def test_what_follows_the_job_to_a_second_node_is_no_nodes_fault() -> None:
    def lost_gpu(node: str) -> Diagnosed:
        return Diagnosed(
            cause="gpu-broken",
            description="a GPU failed",
            attribution=Attribution.NODE.value,
            sureness="likely",
            nodes=[node],
            accused=[node],
            evidence=[f"{node}: GPU 1 is lost"],
        )

    first = ScriptFailure(diagnosed=lost_gpu("n2"), batch_node="n1", nodes=("n1", "n2"))
    second = ScriptFailure(
        diagnosed=lost_gpu("n3"), batch_node="n1", nodes=("n1", "n3"), before=(lost_gpu("n2"),)
    )

    assert plan(first).next is Next.LEAVE
    assert plan(second).next is Next.STOP
    assert not plan(second).at_fault


@pytest.mark.parametrize(("sureness", "most"), [("possible", 0.5), ("likely", 0.9)])
def test_a_verdict_of_a_post_mortem_is_no_surer_than_it(sureness: str, most: float) -> None:
    failure = ScriptFailure(
        diagnosed=found(Attribution.NODE, "n2", sureness=sureness),
        batch_node="n1",
        nodes=("n1", "n2"),
    )

    assert [verdict.probability for verdict in plan(failure).at_fault] == [most]
