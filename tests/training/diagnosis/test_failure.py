# SPDX-License-Identifier: Apache-2.0
"""What follows a failed script: by evidence, and by a check where that decides nothing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from slurm_health.records.script_records import Attribution, Diagnosed, TrainingEvent
from slurm_health.training.diagnosis.failure import JobAtFailure, planned, what_follows
from slurm_health.training.framework import (
    CheckNodes,
    DiagnosisAction,
    LeaveNode,
    StopJob,
)
from tests.support.ended_jobs import hang_at
from tests.support.rows import rows

LOST = (("n2", "Slurm took n2 out of the job; it is DOWN*"),)
WITH_SPARE: dict[str, Any] = {"spares": ("n4",), "least": 3}


def follows(cause: Diagnosed | None = None, **known: Any) -> DiagnosisAction:
    job = {"batch_node": "n1", "nodes": ("n1", "n2", "n3"), **known}
    return what_follows(cause, JobAtFailure(**job))


def cause(
    attribution: Attribution,
    *accused: str,
    sureness: str = "likely",
    name: str = "a-cause",
    line: str = "a line",
) -> Diagnosed:
    return Diagnosed(
        cause=name,
        description="something broke",
        attribution=attribution.value,
        sureness=sureness,
        nodes=list(accused),
        accused=list(accused),
        evidence=[line],
    )


def test_a_lost_node_is_left_for_a_spare_that_is_checked_first() -> None:
    action = follows(lost=LOST, **WITH_SPARE)

    assert isinstance(action, CheckNodes)
    assert action.nodes == ("n1", "n3", "n4")
    assert [verdict.node for verdict in action.at_fault] == ["n2"]
    assert LOST[0][1] in action.evidence
    assert planned(action, restart=1, max_restarts=3).nodes == ["n2"]


@given(
    st.none()
    | st.builds(
        cause,
        st.sampled_from(Attribution),
        st.sampled_from(["n1", "n2", "n4"]),
        sureness=st.sampled_from(["possible", "likely"]),
    ),
    st.builds(
        JobAtFailure,
        job_over=st.sampled_from(["", "TIMEOUT"]),
        batch_node=st.just("n1"),
        nodes=st.just(("n1", "n2", "n3")),
        spares=st.sampled_from([(), ("n4",)]),
        lost=st.sampled_from([(), LOST]),
        restarted_unchecked=st.booleans(),
        least=st.none() | st.integers(1, 4),
    ),
)
def test_every_action_says_why_and_checks_no_node_that_it_holds_at_fault(
    found: Diagnosed | None, job: JobAtFailure
) -> None:
    action = what_follows(found, job)
    verdicts = action.at_fault if isinstance(action, CheckNodes | LeaveNode) else ()
    guilty = {verdict.node for verdict in verdicts}

    assert action.reason
    assert all(verdict.evidence for verdict in verdicts)
    assert guilty <= {*(found.accused if found else ()), *(node for node, _ in job.lost)}
    assert isinstance(action, StopJob) or not job.job_over
    if isinstance(action, CheckNodes):
        assert guilty.isdisjoint(action.nodes)
        assert "n1" in action.nodes


def test_the_same_words_undecided_twice_are_not_started_a_third_time() -> None:
    def crashed(node: str, rank: int, name: str = "crashed") -> Diagnosed:
        line = f"srun: error: {node}: task {rank}: Segmentation fault"
        return structs.replace(cause(Attribution.UNDECIDED, name=name, line=line), nodes=[node])

    assert isinstance(follows(crashed("n3", 3)), CheckNodes)
    # A check found a node at fault since.
    assert isinstance(follows(crashed("n3", 3), before=(crashed("n2", 1),)), CheckNodes)
    assert isinstance(follows(crashed("n3", 3), checked=(crashed("n2", 1),)), StopJob)
    assert isinstance(follows(crashed("n3", 3), checked=(crashed("n2", 1, "killed"),)), CheckNodes)


@pytest.mark.parametrize(
    ("name", "follows_it", "words"),
    [
        ("gpu-broken", StopJob, "a check has judged its nodes healthy since"),
        ("memory-broken", LeaveNode, "but cannot test for it"),
    ],
)
def test_a_node_that_a_check_found_healthy_since_is_at_fault_only_for_what_no_check_sees(
    name: str, follows_it: type[DiagnosisAction], words: str
) -> None:
    again = cause(Attribution.NODE, "n2", name=name)
    action = follows(again, checked=(again,))

    assert isinstance(follows(again), LeaveNode)
    assert isinstance(action, follows_it)
    assert words in action.reason


def test_what_follows_the_job_to_a_second_node_is_no_nodes_fault() -> None:
    def lost_gpu(node: str) -> Diagnosed:
        return cause(Attribution.NODE, node, line=f"{node}: GPU 1 is lost")

    second = follows(lost_gpu("n3"), nodes=("n1", "n3"), before=(lost_gpu("n2"),))

    assert isinstance(follows(lost_gpu("n2"), nodes=("n1", "n2")), LeaveNode)
    assert isinstance(second, StopJob)
    assert "the same as on n2, which the job left" in second.reason


@pytest.mark.parametrize(("sureness", "most"), [("possible", 0.5), ("likely", 0.9)])
def test_a_verdict_of_a_post_mortem_is_no_surer_than_it(sureness: str, most: float) -> None:
    action = follows(cause(Attribution.NODE, "n2", sureness=sureness))

    assert isinstance(action, LeaveNode)
    assert [verdict.probability for verdict in action.at_fault] == [most]


# --- hangs for which the monitor had the script ended ---------------------------------------------


def hang(
    name: str = "rank-stopped", sureness: str = "certain", nodes: tuple[str, ...] = ("n2",)
) -> TrainingEvent:
    return hang_at(name, "rank 1 keeps the others waiting", nodes=nodes, sureness=sureness)


def after_hang(event: TrainingEvent, *before: TrainingEvent) -> DiagnosisAction:
    found = cause(Attribution.UNDECIDED)
    return follows(found, hang=event, hangs_before=before, **WITH_SPARE)


def test_after_a_hang_it_is_said_what_hung_and_how_often() -> None:
    third = after_hang(hang(), hang(), hang(nodes=("n3",)))
    inside = hang("data-loader-stuck", "likely")

    assert "rank 1 keeps the others waiting" in after_hang(hang()).reason
    assert "2 times after such a hang (rank-stopped)" in third.reason
    assert isinstance(after_hang(inside), StopJob)
    assert isinstance(after_hang(structs.replace(inside, beyond_script=True)), CheckNodes)


@rows
def test_three_starts_in_a_row_that_come_no_further_are_the_last(
    steps: tuple[int, ...], saved: tuple[str, ...], stops: bool
) -> None:
    action = follows(cause(Attribution.UNDECIDED), steps=steps, saved=saved)

    assert isinstance(action, StopJob if stops else CheckNodes)
    assert ("came no further than step 120" in action.reason) is stops


def test_a_node_at_fault_explains_why_starts_came_no_further() -> None:
    action = follows(cause(Attribution.NODE, "n2"), steps=(9, 9, 9))

    assert isinstance(action, LeaveNode)
