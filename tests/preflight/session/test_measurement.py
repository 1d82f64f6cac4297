# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from slurm_health.preflight.localize import Localizer
from slurm_health.preflight.localize.settings import DeviceKind, settings_from
from slurm_health.preflight.session.measurement import (
    allgather_busbw_gb_per_s,
    figures_of,
    group_result,
    group_times,
)
from slurm_health.records.probe_catalog import Metric
from slurm_health.records.records import NodeReported, Sampled
from slurm_health.records.verdict import GroupResult, Level, Outcome
from tests.support.rows import rows

GROUP = ("n1", "n2")
ALLGATHER, MATMUL = Metric(probe="allgather"), Metric(probe="matmul")
Group = tuple[str, ...]


def reports(**outcomes: Outcome) -> dict[str, NodeReported]:
    return {
        node: NodeReported(node=node, round=0, outcome=outcome)
        for node, outcome in outcomes.items()
    }


def sampled(
    node: str, probe: str, *iteration_ms: list[float], taken_ms: list[float] | None = None
) -> Sampled:
    return Sampled(
        taken_ms=[] if taken_ms is None else [taken_ms],
        node=node,
        round=0,
        group=list(GROUP),
        probe=probe,
        iteration_ms=list(iteration_ms),
        scope={"allgather": "pair", "rail_allgather": "rail", "node_allgather": "node"}.get(
            probe, "solo"
        ),
    )


def test_bandwidth_is_what_nccl_tests_prints() -> None:
    # 1 GiB gathered by 8 ranks in 4.5 ms: algbw 238.61 GB/s, busbw 208.78 GB/s.
    busbw = allgather_busbw_gb_per_s(total_bytes=2**30, ranks=8, elapsed_ms=4.5)

    assert busbw == pytest.approx(208.78, abs=0.01)


@pytest.mark.parametrize(
    ("probe", "iteration_ms", "taken_ms", "expected_ms"),
    [
        pytest.param("matmul", [[1.0, 2.0, 3.0, 4.0, 100.0]], None, 3.0, id="own work: median"),
        pytest.param("allgather", [[1.0, 2.0, 3.0, 4.0, 99.0]], None, 2.0, id="transfer: quartile"),
        pytest.param("matmul", [[1.0] * 3, [9.0] * 3, [2.0] * 3], None, 9.0, id="slowest device"),
        pytest.param("matmul", [[10.0, 30.0, 90.0]], [0.0, 20.0, 80.0], 10.0, id="crowded"),
        pytest.param("matmul", [[10.0, 11.0, 12.0, 90.0]], [0, 0, 0, 80.0], 11.0, id="one window"),
        ("matmul", [], None, None),
        ("matmul", [[]], None, None),
        ("matmul", [[0.0]], None, None),
        ("matmul", [[-1.0]], None, None),
        pytest.param("matmul", [[float("inf")]], None, None, id="endless"),
    ],
)
def test_a_probe_has_one_time_without_what_others_took_or_none_if_it_cannot_have_been_measured(
    probe: str,
    iteration_ms: list[list[float]],
    taken_ms: list[float] | None,
    expected_ms: float | None,
) -> None:
    sample = sampled("n1", probe, *iteration_ms, taken_ms=taken_ms)
    slowest = max((timed.own_ms for timed in group_times(["n1"], [sample])), default=None)

    assert slowest == (None if expected_ms is None else pytest.approx(expected_ms, abs=1.0))


# Training steps on four nodes that share two cores (2 shared virtual cores, Debian 12, 2026-11-25):
# n1 and n2 beside twelve processes of others, n3 with a limit of a fifth of a core, n4 by itself.
CROWDED_MS = {
    "n1": ([494.0, 423.0, 272.0], [447.0, 397.0, 226.0]),
    "n2": ([410.0, 366.0, 547.0], [356.0, 312.0, 494.0]),
    "n3": ([280.0, 282.0, 261.0], []),
    "n4": ([54.6, 66.5, 50.6], []),
}


def judged(own_steps: Callable[[str], Sampled]) -> dict[str, Level]:
    """Judge four nodes by their own steps; what they do together takes all pairs as long."""
    localizer = Localizer(list(CROWDED_MS), settings=settings_from({}, kind=DeviceKind.CPU))
    while (planned := localizer.next_round()) is not None:
        results = []
        for group in planned.groups:
            samples = [each for node in group for each in (own_steps(node), exchange(node))]
            of_group = [replace(each, group=list(group)) for each in samples]
            ended = reports(**dict.fromkeys(group, Outcome.MEASURED))
            results.append(group_result(group, of_group, ended))
        localizer.observe(planned.index, results)
    return {name: node.level for name, node in localizer.verdict().nodes.items()}


def exchange(node: str) -> Sampled:
    return sampled(node, "allgather", [5.0])


def steps(node: str) -> Sampled:
    elapsed_ms, taken_ms = CROWDED_MS[node]
    return sampled(node, "gpt", elapsed_ms, taken_ms=taken_ms)


def test_a_crowded_node_is_not_slow_and_one_that_its_own_limit_holds_back_is() -> None:
    levels = judged(steps)

    assert levels.pop("n3") is Level.SLOW
    assert set(levels.values()) == {Level.HEALTHY}


@pytest.mark.parametrize(("told", "level"), [(True, Level.HEALTHY), (False, Level.SLOW)])
def test_two_of_four_nodes_that_others_crowd_are_accused_only_if_nobody_tells_of_it(
    told: bool, level: Level
) -> None:
    def without_limit(node: str) -> Sampled:
        sample = replace(steps("n4" if node == "n3" else node), node=node)
        return sample if told else replace(sample, taken_ms=[])

    assert judged(without_limit) == {
        "n1": level,
        "n2": level,
        "n3": Level.HEALTHY,
        "n4": Level.HEALTHY,
    }


def level_of(node: str, exchange_ms: float, served: Callable[[Group], float]) -> Level:
    """Return the level of one of four nodes whose exchanges take so long, and others 5 ms."""
    localizer = Localizer(["n1", "n2", "n3", "n4"], settings=settings_from({}, kind=DeviceKind.CPU))
    while (planned := localizer.next_round()) is not None:
        results = [
            GroupResult(
                nodes=group,
                outcome=Outcome.MEASURED,
                shared_ms={ALLGATHER: exchange_ms if node in group else 5.0},
                served=served(group),
            )
            for group in planned.groups
        ]
        localizer.observe(planned.index, results)
    verdict = localizer.verdict()
    assert not {*verdict.named(Level.SLOW)} - {node}
    return verdict.nodes[node].level


def test_where_most_nodes_are_crowded_an_exchange_must_be_slower_to_accuse_one() -> None:
    assert level_of("n1", 40.0, lambda _: 1.0) is Level.SLOW
    assert level_of("n1", 40.0, lambda _: 0.1) is Level.HEALTHY


def test_one_crowded_node_neither_hides_a_slow_network_nor_is_blamed_for_its_own() -> None:
    def served(group: Group) -> float:
        return 0.2 if "n1" in group else 1.0

    assert level_of("n1", 20.0, served) is not Level.SLOW
    assert level_of("n2", 20.0, served) is Level.SLOW


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


MEASURED = {node: {"outcome": "measured"} for node in GROUP}


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """What members of a group measured (node, probe, times, taken) and reported, and its result."""

    samples: list[list[Any]] = []
    told: dict[str, dict[str, Any]] | None = None  # all have measured
    models: dict[str, str] = {}
    timed_out: bool = False
    silent: list[str] = []
    outcome: Outcome = Outcome.MEASURED
    shared_ms: dict[str, float] = {}
    node_ms: dict[str, dict[str, float]] = {}
    found_silent: list[str] | None = None
    crashed: list[str] = []
    said: dict[str, str] = {}


@rows
def test_the_result_of_a_group_follows_from_its_members(case: Case) -> None:
    samples = [
        replace(sampled(node, probe, *times), taken_ms=taken[0] if taken else [])
        for node, probe, times, *taken in case.samples
    ]
    told = {
        node: msgspec.convert({"node": node, "round": 0, **said}, NodeReported)
        for node, said in (MEASURED if case.told is None else case.told).items()
    }

    result = group_result(
        GROUP,
        samples,
        told,
        silent=case.silent,
        timed_out=case.timed_out,
        models=case.models,
    )

    assert result.outcome is case.outcome
    assert {str(metric): ms for metric, ms in result.shared_ms.items()} == case.shared_ms
    assert {str(metric): {**ms} for metric, ms in result.node_ms.items()} == case.node_ms
    assert case.found_silent in (None, [*result.silent])
    assert ([*result.crashed], result.said) == (case.crashed, case.said)


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
