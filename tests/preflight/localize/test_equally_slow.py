# SPDX-License-Identifier: Apache-2.0
"""Equally slow nodes in different pairs: what is known of pairs shows them, or a cheap round."""

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from msgspec.structs import replace

from slurm_health.preflight.localize.localizer import Level, Localizer, LocalizeSettings
from slurm_health.preflight.localize.simulate import ALLGATHER_MS, Faults, SimulatedCluster, Weather
from slurm_health.records.verdict import Verdict
from tests.preflight.localize.test_localizer import names, planned
from tests.support.rows import rows

WEATHER = Weather(noise=0.01, spread=0.0, spikes=0.0)
KNOWN = LocalizeSettings(expected_ms={"allgather": ALLGATHER_MS})


def judged(
    count: int,
    *,
    settings: LocalizeSettings | None = None,
    slow: Mapping[str, float] = MappingProxyType({}),
    round_s: float | None = None,
) -> tuple[Verdict, int]:
    """Return verdict and rounds where each round takes so long, and these networks are slow."""
    nodes = names(count)
    cluster = SimulatedCluster(nodes, faults=Faults(network=slow), weather=WEATHER)
    localizer = Localizer(nodes, settings=settings)
    rounds = 0
    while (round_ := localizer.next_round()) is not None:
        rounds += 1
        results = [replace(result, round_s=round_s) for result in cluster.answer(round_)]
        localizer.observe(round_.index, results)
    return localizer.verdict(), rounds


def one_of_each_pair() -> dict[str, float]:
    return {group[0]: 1.5 for group in planned(Localizer(names(4))).groups}


def test_pairs_that_are_slow_against_what_is_known_are_in_doubt_although_none_is_faster() -> None:
    slow = one_of_each_pair()
    verdict, rounds = judged(4, settings=KNOWN, slow=slow)

    assert rounds > 1
    assert not set(verdict.named(Level.HEALTHY)) & set(slow)
    assert not set(verdict.named(Level.SLOW)) - set(slow)


def test_what_is_known_of_pairs_accuses_no_node_by_itself() -> None:
    verdict, rounds = judged(4, settings=KNOWN, slow=dict.fromkeys(names(4), 1.5))

    assert rounds > 1
    assert not verdict.named(Level.SLOW)
    assert not verdict.named(Level.FAULTY)


@rows
def test_where_nothing_is_known_of_pairs_few_nodes_are_paired_again_if_that_is_cheap(
    count: int, known: bool, round_s: float | None, made: int, reason: str
) -> None:
    verdict, rounds = judged(count, settings=KNOWN if known else None, round_s=round_s)

    assert rounds == made
    assert {found.level for found in verdict.nodes.values()} == {Level.HEALTHY}
    for found in verdict.nodes.values():
        assert found.reason.partition("; not excluded")[0] == reason


@pytest.mark.parametrize("compute", [{}, {"n1": 3.0}])
def test_what_nodes_do_by_themselves_is_measured_again_only_where_one_is_in_doubt(
    compute: dict[str, float],
) -> None:
    nodes = names(4)
    cluster = SimulatedCluster(nodes, faults=Faults(compute=compute), weather=WEATHER)
    localizer = Localizer(nodes)
    first = planned(localizer)
    assert not first.shared_only
    results = [replace(result, round_s=0.3) for result in cluster.answer(first)]
    localizer.observe(first.index, results)

    assert planned(localizer).shared_only == (not compute)
