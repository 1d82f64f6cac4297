# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_health.preflight.localize import Localizer
from slurm_health.preflight.session.measurement import (
    allgather_busbw_gb_per_s,
    group_result,
    lower_quartile,
    rate_gflop_per_s,
    reduced_ms,
)
from slurm_health.records.probe_catalog import Metric
from slurm_health.records.records import NodeReported, Sampled
from slurm_health.records.verdict import GroupResult, Outcome
from slurm_health.report.measured import figures_of

GROUP = ("n1", "n2")
ALLGATHER, MATMUL = Metric(probe="allgather"), Metric(probe="matmul")


def reports(**outcomes: Outcome) -> dict[str, NodeReported]:
    return {
        node: NodeReported(node=node, round=0, outcome=outcome)
        for node, outcome in outcomes.items()
    }


def sampled(node: str, probe: str, *iteration_ms: list[float]) -> Sampled:
    return Sampled(
        node=node,
        round=0,
        group=list(GROUP),
        probe=probe,
        iteration_ms=list(iteration_ms),
        scope="pair" if probe == "allgather" else "solo",
    )


def test_bandwidth_is_what_nccl_tests_prints() -> None:
    # 1 GiB gathered by 8 ranks in 4.5 ms: algbw 238.61 GB/s, busbw 208.78 GB/s.
    busbw = allgather_busbw_gb_per_s(total_bytes=2**30, ranks=8, elapsed_ms=4.5)

    assert busbw == pytest.approx(208.78, abs=0.01)


def test_one_rank_alone_moves_nothing() -> None:
    assert allgather_busbw_gb_per_s(total_bytes=2**30, ranks=1, elapsed_ms=4.5) == 0.0


def test_a_rate_is_work_over_time() -> None:
    assert rate_gflop_per_s(flop=2e9, elapsed_ms=40.0) == pytest.approx(50.0)


def test_a_nodes_own_work_counts_by_its_median_and_a_transfer_by_its_lower_quartile() -> None:
    iterations = [[1.0, 2.0, 3.0, 4.0, 100.0]]

    assert reduced_ms(sampled("n1", "matmul", *iterations)) == 3.0
    assert reduced_ms(sampled("n1", "allgather", *iterations)) == 2.0


def test_the_slowest_device_counts() -> None:
    assert reduced_ms(sampled("n1", "matmul", *[[1.0] * 3, [9.0] * 3, [2.0] * 3])) == 9.0


@pytest.mark.parametrize("iterations", [[], [[]], [[0.0]], [[-1.0]], [[float("inf")]]])
def test_what_cannot_have_been_measured_is_unknown_and_not_zero(
    iterations: list[list[float]],
) -> None:
    assert reduced_ms(sampled("n1", "matmul", *iterations)) is None


@given(st.lists(st.floats(0.001, 1e6), min_size=1))
def test_three_quarters_are_not_below_the_lower_quartile(values: list[float]) -> None:
    quartile = lower_quartile(values)

    assert sum(value >= quartile for value in values) >= 0.75 * len(values)


def test_a_group_is_as_slow_as_its_slowest_member_and_each_node_has_its_own_work() -> None:
    result = group_result(
        GROUP,
        [
            sampled("n1", "matmul", [3.0]),
            sampled("n2", "matmul", [4.0]),
            sampled("n1", "allgather", [50.0]),
            sampled("n2", "allgather", [51.0]),
        ],
        reports(n1=Outcome.MEASURED, n2=Outcome.MEASURED),
    )

    assert result == GroupResult(
        nodes=GROUP,
        outcome=Outcome.MEASURED,
        shared_ms={ALLGATHER: 51.0},
        node_ms={MATMUL: {"n1": 3.0, "n2": 4.0}},
    )


def test_a_group_of_which_a_member_was_not_timed_has_no_time_for_verdict_and_table_alike() -> None:
    samples = [
        sampled("n1", "matmul", [3.0]),
        sampled("n1", "allgather", [50.0]),
        sampled("n2", "allgather", [float("inf")]),
    ]

    result = group_result(GROUP, samples, reports(n1=Outcome.MEASURED, n2=Outcome.MEASURED))
    shown = figures_of(samples).by_node

    assert result.shared_ms == {}
    assert result.node_ms == {MATMUL: {"n1": 3.0}}
    assert not [figure for figures in shown.values() for figure in figures]


@pytest.mark.parametrize(
    ("told", "timed_out", "silent", "outcome"),
    [
        ({"n1": Outcome.MEASURED, "n2": Outcome.MEASURED}, False, [], Outcome.MEASURED),
        ({"n1": Outcome.FAILED, "n2": Outcome.MEASURED}, False, [], Outcome.FAILED),
        ({"n1": Outcome.FAILED, "n2": Outcome.TIMED_OUT}, True, [], Outcome.FAILED),
        ({"n1": Outcome.MEASURED, "n2": Outcome.TIMED_OUT}, False, [], Outcome.TIMED_OUT),
        ({"n1": Outcome.NOT_RUN, "n2": Outcome.NOT_RUN}, True, [], Outcome.TIMED_OUT),
        ({"n1": Outcome.MEASURED, "n2": Outcome.NOT_RUN}, False, [], Outcome.NOT_RUN),
        ({"n1": Outcome.TIMED_OUT}, True, ["n2"], Outcome.NOT_RUN),
        ({"n1": Outcome.FAILED}, False, ["n2"], Outcome.NOT_RUN),
        ({}, True, [], Outcome.NOT_RUN),
    ],
)
def test_the_outcome_of_a_group_follows_from_its_members(
    told: Mapping[str, Outcome], timed_out: bool, silent: list[str], outcome: Outcome
) -> None:
    result = group_result(GROUP, [], reports(**told), silent=silent, timed_out=timed_out)

    assert result.outcome is outcome


def test_a_silent_node_of_another_group_is_of_no_concern() -> None:
    result = group_result(GROUP, [], reports(n1=Outcome.MEASURED, n2=Outcome.MEASURED), silent="n9")

    assert (result.outcome, result.silent) == (Outcome.MEASURED, ())


def test_only_the_member_whose_own_process_died_is_said_to_have_crashed() -> None:
    told = reports(n1=Outcome.FAILED)
    told["n2"] = NodeReported(node="n2", round=0, outcome=Outcome.FAILED, crashed=True)

    assert group_result(GROUP, [], told).crashed == ("n2",)


def test_what_failed_between_two_nodes_is_said_of_both() -> None:
    wrong = "allgather: rank 0 of 2 received other data than rank 1 sent"
    told = reports(n2=Outcome.MEASURED)
    told["n1"] = NodeReported(node="n1", round=0, outcome=Outcome.FAILED, detail=wrong)

    result = group_result(GROUP, [], told)

    assert (result.outcome, result.said) == (Outcome.FAILED, {"n1": wrong})
    localizer = Localizer(nodes=["n1", "n2"])
    planned = localizer.next_round()
    assert planned is not None
    localizer.observe(planned.index, [result])
    for verdict in localizer.verdict().nodes.values():
        assert any(wrong in line for line in verdict.evidence)


def test_each_device_of_a_node_is_judged_apart_so_that_a_verdict_can_name_it() -> None:
    result = group_result(
        ("n1",), [sampled("n1", "matmul", [3.0], [4.5], [3.1])], reports(n1=Outcome.MEASURED)
    )

    assert result.node_ms == {
        replace(MATMUL, part="device 0"): {"n1": 3.0},
        replace(MATMUL, part="device 1"): {"n1": 4.5},
        replace(MATMUL, part="device 2"): {"n1": 3.1},
    }


def test_a_rail_is_as_slow_as_the_slower_of_its_two_devices() -> None:
    rails = [
        replace(sampled(node, "rail_allgather", *times), scope="rail")
        for node, times in (("n1", ([5.0], [5.1])), ("n2", ([5.2], [9.9])))
    ]

    result = group_result(GROUP, rails, reports(n1=Outcome.MEASURED, n2=Outcome.MEASURED))

    assert result.shared_ms == {
        Metric(probe="rail_allgather", part="rail 0"): 5.2,
        Metric(probe="rail_allgather", part="rail 1"): 9.9,
    }


def test_the_devices_of_a_node_together_have_one_time_of_its_own() -> None:
    together = replace(sampled("n1", "node_allgather", [5.0], [6.0]), scope="node")

    result = group_result(("n1",), [together], reports(n1=Outcome.MEASURED))

    assert result.node_ms == {Metric(probe="node_allgather"): {"n1": 6.0}}
    assert result.shared_ms == {}


def test_nodes_of_different_models_are_not_compared_in_what_they_do_alone() -> None:
    models = {"n1": "NVIDIA H200", "n2": "NVIDIA A100"}
    samples = [
        sampled("n1", "matmul", [3.0]),
        sampled("n2", "matmul", [9.0]),
        sampled("n1", "allgather", [50.0]),
        sampled("n2", "allgather", [50.0]),
    ]

    told = reports(n1=Outcome.MEASURED, n2=Outcome.MEASURED)
    result = group_result(GROUP, samples, told, models=models)

    assert result.node_ms == {
        replace(MATMUL, model="NVIDIA H200"): {"n1": 3.0},
        replace(MATMUL, model="NVIDIA A100"): {"n2": 9.0},
    }
    assert result.shared_ms == {ALLGATHER: 50.0}


def test_a_probe_that_could_not_measure_counts_like_a_node_that_was_not_there() -> None:
    told = reports(n1=Outcome.NOT_RUN)
    told["n2"] = NodeReported(
        node="n2", round=0, outcome=Outcome.NOT_RUN, detail="no memory", unmeasured=True
    )

    result = group_result(GROUP, [], told)

    assert (result.outcome, result.silent, result.said) == (
        Outcome.NOT_RUN,
        ("n2",),
        {"n2": "no memory"},
    )
