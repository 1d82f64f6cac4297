# SPDX-License-Identifier: Apache-2.0
"""Slow uplinks and paths, known or not, are named as such and cost no healthy node its place."""

from __future__ import annotations

import random
from collections.abc import Callable, Set

import pytest
from msgspec.structs import replace

from slurm_health.preflight.localize.localizer import (
    GroupResult,
    Level,
    Localizer,
    LocalizeSettings,
    Outcome,
)
from slurm_health.preflight.localize.simulate import (
    ALLGATHER_MS,
    Faults,
    SimulatedCluster,
    Weather,
    play,
)
from slurm_health.records.nodeset import expand
from slurm_health.records.probe_catalog import Metric
from slurm_health.records.verdict import Round, Verdict
from tests.preflight.localize.test_localizer import run

LEAVES = {f"leaf{k}": tuple(f"n{8 * k + j}" for j in range(8)) for k in range(8)}
NODES = [node for members in LEAVES.values() for node in members]


def judged(faults: Faults, *, seed: int = 0, min_rounds: int = 1) -> Verdict:
    cluster = SimulatedCluster(NODES, faults=faults, weather=Weather(), topology=LEAVES, seed=seed)
    chosen = LocalizeSettings(seed=seed, min_rounds=min_rounds)
    verdict, _ = play(Localizer(NODES, topology=LEAVES, settings=chosen), cluster)
    return verdict


def accused(verdict: Verdict) -> set[str]:
    return {*verdict.named(Level.SLOW), *verdict.named(Level.FAULTY)}


@pytest.mark.heavy
def test_a_slow_uplink_is_named_and_no_node_is_blamed() -> None:
    for seed in range(4):
        verdict = judged(Faults(leaves={"leaf3": 1.3}), seed=seed)
        assert [leaf.ends for leaf in verdict.leaves] == [("leaf3",)]
        assert verdict.leaves[0].level is Level.SLOW
        assert "healthy pairs" in verdict.leaves[0].reason
        assert not accused(verdict)


def test_a_healthy_run_over_several_leaves_crosses_them_before_it_ends() -> None:
    cluster = SimulatedCluster(NODES, faults=Faults(), weather=Weather(), topology=LEAVES)
    loc = Localizer(NODES, topology=LEAVES)
    verdict, rounds = play(loc, cluster)
    leaf_of = {node: leaf for leaf, members in LEAVES.items() for node in members}
    crossing = [any(leaf_of[a] != leaf_of[b] for a, b in each.groups) for each in rounds]
    assert crossing == [False, True]
    assert not accused(verdict)


def test_a_slow_node_behind_a_slow_uplink_is_found_as_well() -> None:
    verdict = judged(Faults(leaves={"leaf3": 1.3}, network={"n25": 2.0}))
    assert [leaf.ends for leaf in verdict.leaves] == [("leaf3",)]
    assert accused(verdict) == {"n25"}


def test_a_slow_path_between_two_leaves_is_named_given_enough_rounds() -> None:
    faults = Faults(paths={frozenset({"leaf1", "leaf6"}): 1.5})
    verdict = judged(faults, min_rounds=6)
    assert {frozenset(path.ends) for path in verdict.paths} == {frozenset({"leaf1", "leaf6"})}
    assert not verdict.leaves
    assert not accused(verdict)


def cut_off(cut: Callable[[set[str]], bool]) -> Callable[[int, tuple[str, ...]], GroupResult]:
    """Answer in time, but for the groups that something is cut between."""

    def answer(_index: int, group: tuple[str, ...]) -> GroupResult:
        outcome = Outcome.TIMED_OUT if cut(set(group)) else Outcome.MEASURED
        return GroupResult(nodes=group, outcome=outcome)

    return answer


def test_an_uplink_that_carries_nothing_is_faulty_and_its_nodes_are_not() -> None:
    below = set(LEAVES["leaf5"])

    verdict, _ = run(NODES, cut_off(lambda group: len(below & group) == 1), topology=LEAVES)

    assert [leaf.ends for leaf in verdict.leaves] == [("leaf5",)]
    assert verdict.leaves[0].level is Level.FAULTY
    assert not accused(verdict)


def test_a_cable_between_two_good_nodes_is_a_path_and_nobody_is_blamed() -> None:
    nodes = [f"n{number}" for number in range(8)]
    first = Localizer(nodes).next_round()
    assert first is not None
    broken = set(first.groups[0])

    verdict, _ = run(nodes, cut_off(lambda group: group == broken))

    assert [set(path.ends) for path in verdict.paths] == [broken]
    assert verdict.paths[0].level is Level.FAULTY
    assert not accused(verdict)


def test_one_slow_card_of_two_is_named_by_its_rail() -> None:
    def answer(index: int, group: tuple[str, ...]) -> GroupResult:
        well_ms = 6.0 + index / 100
        rails: dict[Metric | str, float] = {
            "allgather:mlx5_0": well_ms,
            "allgather:mlx5_2": 12.0 if "n3" in group else well_ms,
        }
        return GroupResult(nodes=group, outcome=Outcome.MEASURED, shared_ms=rails)

    verdict, _ = run([f"n{number}" for number in range(8)], answer)

    assert verdict.nodes["n3"].level is Level.SLOW
    assert verdict.nodes["n3"].component == "network mlx5_2"
    assert accused(verdict) == {"n3"}


def unaware(
    faults: Faults,
    *,
    nodes: list[str] = NODES,
    leaf: int = 8,
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


@pytest.mark.parametrize("seed", range(2))
def test_a_slow_uplink_that_nobody_knows_of_is_named_by_its_nodes(seed: int) -> None:
    verdict, rounds = unaware(Faults(leaves={"leaf3": 1.3}), seed=seed)

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
    verdict, _ = unaware(faint, nodes=nodes, leaf=16, seed=seed, weather=Weather(noise=0.03))

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
