# SPDX-License-Identifier: Apache-2.0
"""A bad uplink that no topology names blames no node; nodes that are slow themselves are found."""

from __future__ import annotations

import random
from collections.abc import Set

import pytest
from msgspec.structs import replace

from slurm_health.preflight.localize.localizer import Level, Localizer, LocalizeSettings
from slurm_health.preflight.localize.simulate import (
    ALLGATHER_MS,
    Faults,
    SimulatedCluster,
    Weather,
    play,
)
from slurm_health.records.nodeset import expand
from slurm_health.records.verdict import GroupResult, Round, Verdict

LEAF = 8
NODES = [f"n{number}" for number in range(64)]


def judged(
    faults: Faults,
    *,
    nodes: list[str] = NODES,
    leaf: int = LEAF,
    seed: int = 0,
    weather: Weather | None = None,
) -> tuple[Verdict, int]:
    """Return verdict and rounds where the nodes hang on leaves of which the run knows nothing."""
    leaves = {f"leaf{k}": nodes[leaf * k : leaf * (k + 1)] for k in range(len(nodes) // leaf)}
    cluster = SimulatedCluster(
        nodes, faults=faults, weather=weather or Weather(), topology=leaves, seed=seed
    )
    verdict, rounds = play(Localizer(nodes, settings=LocalizeSettings(seed=seed)), cluster)
    return verdict, len(rounds)


def accused(verdict: Verdict) -> set[str]:
    return {*verdict.named(Level.SLOW), *verdict.named(Level.FAULTY)}


@pytest.mark.parametrize("seed", range(2))
def test_a_slow_uplink_that_nobody_knows_of_is_named_by_its_nodes(seed: int) -> None:
    verdict, rounds = judged(Faults(leaves={"leaf3": 1.3}), seed=seed)

    assert not accused(verdict)
    assert [leaf.ends for leaf in verdict.leaves] == [("n[24-31]",)]
    assert verdict.leaves[0].level is Level.SLOW
    assert verdict.leaves[0].reason.startswith(
        "allgather slow between n[24-31], which are well with one another, and other nodes in"
    )
    assert rounds <= 6


@pytest.mark.parametrize("seed", [2, 4, 12])
def test_an_uplink_too_faint_for_a_single_test_blames_none_of_the_nodes_below_it(seed: int) -> None:
    nodes = [f"n{number}" for number in range(128)]
    faint = Faults(leaves={"leaf3": 1.12})
    verdict, _ = judged(faint, nodes=nodes, leaf=16, seed=seed, weather=Weather(noise=0.03))

    assert not accused(verdict)
    named = {node for leaf in verdict.leaves for end in leaf.ends for node in expand(end)}
    assert named <= set(nodes[48:64])


class FastOnce:
    """A cluster in which two slow nodes are nearly as fast as healthy ones when first tested."""

    def __init__(self, cluster: SimulatedCluster, slow: Set[str]) -> None:
        self._cluster, self._slow, self.struck = cluster, slow, False

    def answer(self, round_: Round) -> list[GroupResult]:
        return [self._once(result) for result in self._cluster.answer(round_)]

    def _once(self, result: GroupResult) -> GroupResult:
        if self.struck or not self._slow >= set(result.nodes):
            return result
        self.struck = True
        return replace(result, shared_ms={"allgather": 1.04 * ALLGATHER_MS})


@pytest.mark.parametrize("seed", range(2))
def test_slow_nodes_are_convicted_although_two_were_fast_together_once_by_chance(seed: int) -> None:
    slow = set(random.Random(seed).sample(NODES, 10))
    faults = Faults(network=dict.fromkeys(slow, 1.25))
    usual = SimulatedCluster(NODES, faults=faults, weather=Weather(noise=0.05), seed=seed)
    cluster = FastOnce(usual, slow)
    localizer = Localizer(NODES, settings=LocalizeSettings(seed=seed))
    while (round_ := localizer.next_round()) is not None:
        localizer.observe(round_.index, cluster.answer(round_))

    assert cluster.struck
    assert accused(localizer.verdict()) == slow
    assert not localizer.verdict().leaves


class HitTwice:
    """A cluster in which spikes hit the tests of two well nodes in the first two rounds."""

    def __init__(self, cluster: SimulatedCluster, hit: Set[str]) -> None:
        self._cluster, self._hit = cluster, hit

    def answer(self, round_: Round) -> list[GroupResult]:
        results = self._cluster.answer(round_)
        return [self._spiked(result) for result in results] if round_.index < 2 else results

    def _spiked(self, result: GroupResult) -> GroupResult:
        if self._hit.isdisjoint(result.nodes):
            return result
        times = {metric: 1.5 * ms for metric, ms in result.shared_ms.items()}
        return replace(result, shared_ms=times)


@pytest.mark.parametrize("seed", range(3, 6))
def test_spikes_that_make_two_well_nodes_alike_keep_no_slow_node_from_its_verdict(
    seed: int,
) -> None:
    hit = set(NODES[:2])
    slow = set(random.Random(seed).sample(NODES[2:], 10))
    faults = Faults(network=dict.fromkeys(slow, 1.1))
    usual = SimulatedCluster(NODES, faults=faults, weather=Weather(noise=0.02), seed=seed)
    cluster = HitTwice(usual, hit)
    settings = LocalizeSettings(seed=seed, network_floor=0.05, compute_floor=0.05)
    localizer = Localizer(NODES, settings=settings)
    while (round_ := localizer.next_round()) is not None:
        localizer.observe(round_.index, cluster.answer(round_))

    assert accused(localizer.verdict()) == slow
