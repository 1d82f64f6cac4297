# SPDX-License-Identifier: Apache-2.0
"""Whether a job that leaves its slow nodes could start again at once, from what Slurm says."""

from __future__ import annotations

import pytest

from slurm_health.preflight.decide.facts import (
    SOON_S,
    obstacle_to_asking,
    request,
    wait_behind_jobs,
    wait_for_nodes,
)
from slurm_health.records.allocation import Estimate

NOW_S = 1_795_344_000.0


@pytest.mark.parametrize(
    "why",
    ["Resources", "Priority", "None", "ReqNodeNotAvail, UnavailableNodes:n3", "QOSMaxJobsPerUser"],
)
def test_a_job_that_may_start_on_freed_nodes_is_a_reason_to_stay(why: str) -> None:
    said = wait_behind_jobs("12", "gpu", {"15": why})

    assert said == "job 15 waits for nodes of partition gpu, and might be given its own meanwhile"


@pytest.mark.parametrize(
    "why",
    [
        *("BeginTime", "Dependency", "DependencyNeverSatisfied", "JobHeldUser", "JobHeldAdmin"),
        # As squeue shows jobs that were put back and are held, our own among them.
        *("job requeued in held state", "launch failed requeued held"),
        *("launch failure limit exceeded requeued held", "JobHoldMaxRequeue", "BadConstraints"),
    ],
)
def test_a_job_that_does_not_wait_for_nodes_is_none(why: str) -> None:
    assert wait_behind_jobs("12", "gpu", {"15": why}) == ""


def test_the_next_task_of_the_jobs_own_array_takes_its_place_and_its_nodes() -> None:
    throttled = "JobArrayTaskLimit"

    assert wait_behind_jobs("12_1", "gpu", {"12_[2-9%1]": throttled})
    assert wait_behind_jobs("12_1", "gpu", {"15_[2-9%1]": throttled}) == ""


def test_of_an_array_each_reason_counts_that_squeue_names_for_its_tasks() -> None:
    assert wait_behind_jobs("12", "gpu", {"15_[0-5]": "JobHeldUser,Resources"})
    assert wait_behind_jobs("12", "gpu", {"15_[0-5%1]": "JobArrayTaskLimit,Priority"})
    assert wait_behind_jobs("12", "gpu", {"15_[0-5]": "JobHeldUser,JobArrayTaskLimit"}) == ""


def test_of_many_waiting_jobs_some_are_named() -> None:
    said = wait_behind_jobs("12", "gpu", dict.fromkeys(map(str, range(20, 29)), "Priority"))

    assert said.startswith("jobs 20, 21, 22 and 6 more wait for nodes")


def estimate(delay_s: float, *, preempts: bool = False) -> Estimate:
    return Estimate(start_s=NOW_S + delay_s, nodes=("n5",), preempts=preempts)


@pytest.mark.parametrize("delay_s", [-5, 0, SOON_S])
def test_nodes_that_are_free_now_or_in_a_moment_are_no_wait(delay_s: float) -> None:
    assert wait_for_nodes(1, estimate(delay_s), {}, now_s=NOW_S) == ""


@pytest.mark.parametrize(
    ("delay_s", "said"),
    [
        (SOON_S + 1, "1 other node for up to 1 min"),
        (3000, "1 other node for up to 50 min"),
        (3 * 3600, "1 other node for up to 3 h"),
        (5 * 86400, "1 other node for up to 5 d"),
        (2e10, "1 other node, which are in use without an end in sight"),
    ],
)
def test_a_wait_is_said_with_how_long_it_may_be(delay_s: float, said: str) -> None:
    found = wait_for_nodes(1, estimate(delay_s), {}, now_s=NOW_S)

    assert found == f"it would have to wait for {said}"


def test_other_jobs_are_not_ended_for_a_slow_node() -> None:
    said = wait_for_nodes(2, estimate(0, preempts=True), {}, now_s=NOW_S)

    assert said == "it would get 2 other nodes only by ending other jobs"


def test_a_node_that_it_would_keep_but_that_is_being_drained_is_a_wait() -> None:
    said = wait_for_nodes(0, None, {"n1": "MIXED+DRAIN"}, now_s=NOW_S)

    assert said == "it would have to wait for nodes: n1 is MIXED+DRAIN"
    assert wait_for_nodes(0, None, {}, now_s=NOW_S) == ""


def test_slurm_is_asked_for_nodes_like_the_slow_one() -> None:
    fields = {
        "Features": "ib&h100",
        "MinTmpDiskNode": "0",
        "TimeLimit": "2-00:00:00",
        "OverSubscribe": "NO",
    }
    placement = {"partition": "gpu", "reservation": "team"}

    options = request(fields, ["--cpus-per-task=96", "--gres=gpu:8"], placement, more=2)

    assert options == [
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=96",
        "--gres=gpu:8",
        "--partition=gpu",
        "--reservation=team",
        "--constraint=ib&h100",
        "--time=2-00:00:00",
        "--exclusive",
    ]


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"Features": "[rack1|rack2]"}, "--constraint"),
        ({"Features": "fast*2&big*2"}, "--constraint"),
        ({"Contiguous": "1"}, "--contiguous"),
        ({"ReqSwitch": "1@00:05:00"}, "--switches"),
        ({"Features": "ib&h100|a100", "Contiguous": "0"}, ""),
        ({}, ""),
    ],
)
def test_what_is_asked_of_all_nodes_together_cannot_be_asked_of_some(
    fields: dict[str, str], option: str
) -> None:
    assert option in obstacle_to_asking(fields)
    assert bool(option) is bool(obstacle_to_asking(fields))
