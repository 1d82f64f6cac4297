# SPDX-License-Identifier: Apache-2.0

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
NODES = ("n1", "n2", "n3", "n4")


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


@rows
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


def test_a_crowded_node_is_not_slow_and_one_that_its_own_limit_holds_back_is() -> None:
    localizer = Localizer(list(CROWDED_MS), settings=settings_from({}, kind=DeviceKind.CPU))
    while (planned := localizer.next_round()) is not None:
        results = []
        for group in planned.groups:
            samples = [sampled(node, "allgather", [5.0]) for node in group]
            for node in group:
                elapsed_ms, taken_ms = CROWDED_MS[node]
                samples.append(sampled(node, "gpt", elapsed_ms, taken_ms=taken_ms))
            of_group = [replace(sample, group=list(group)) for sample in samples]
            ended = reports(**dict.fromkeys(group, Outcome.MEASURED))
            results.append(group_result(group, of_group, ended))
        localizer.observe(planned.index, results)

    levels = {name: node.level for name, node in localizer.verdict().nodes.items()}
    assert levels.pop("n3") is Level.SLOW
    assert set(levels.values()) == {Level.HEALTHY}


@rows
def test_the_more_nodes_are_crowded_the_slower_an_exchange_must_be_to_accuse_one(
    node: str, exchange_ms: float, served: dict[str, float], accused: bool
) -> None:
    localizer = Localizer(NODES, settings=settings_from({}, kind=DeviceKind.CPU))
    while (planned := localizer.next_round()) is not None:
        results = [
            GroupResult(
                nodes=group,
                outcome=Outcome.MEASURED,
                shared_ms={ALLGATHER: exchange_ms if node in group else 5.0},
                served=min(served.get(member, 1.0) for member in group),
            )
            for group in planned.groups
        ]
        localizer.observe(planned.index, results)

    assert localizer.verdict().named(Level.SLOW) == ((node,) if accused else ())


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
