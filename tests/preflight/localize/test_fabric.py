# SPDX-License-Identifier: Apache-2.0
"""Slow uplinks and paths, known or not, are named as such and cost no healthy node its place."""

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
from slurm_health.records.verdict import Verdict
from tests.preflight.localize.test_localizer import accused, planned, run

LEAVES = {f"leaf{k}": tuple(f"n{8 * k + j}" for j in range(8)) for k in range(8)}
NODES = [node for members in LEAVES.values() for node in members]


def judged(
    faults: Faults,
    *,
    nodes: list[str] = NODES,
    leaf: int = 8,
    known: bool = False,
    weather: Weather | None = None,
    **settings: int,
) -> tuple[Verdict, int]:
    """Return verdict and rounds where nodes hang on leaves, of which the run knows or does not."""
    leaves = {f"leaf{k}": nodes[leaf * k : leaf * (k + 1)] for k in range(len(nodes) // leaf)}
    chosen = LocalizeSettings(**settings)  # type: ignore[arg-type]
    cluster = SimulatedCluster(
        nodes, faults=faults, weather=weather or Weather(), topology=leaves, seed=chosen.seed
    )
    topology = leaves if known else None
    verdict, rounds = play(Localizer(nodes, topology=topology, settings=chosen), cluster)
    return verdict, len(rounds)


def test_a_healthy_run_over_several_leaves_crosses_them_before_it_ends() -> None:
    cluster = SimulatedCluster(NODES, faults=Faults(), weather=Weather(), topology=LEAVES)
    loc = Localizer(NODES, topology=LEAVES)
    verdict, rounds = play(loc, cluster)
    leaf_of = {node: leaf for leaf, members in LEAVES.items() for node in members}
    crossing = [any(leaf_of[a] != leaf_of[b] for a, b in each.groups) for each in rounds]
    assert crossing == [False, True]
    assert not accused(verdict)


def test_a_run_with_two_good_tests_inside_leaves_and_two_across_them_comes_to_an_end() -> None:
    faults = Faults(failing={"n1": 1.0}, silent=frozenset({"n6"}))
    verdict, _ = judged(faults, nodes=NODES[:8], leaf=4, known=True)
    assert accused(verdict) == {"n1"}
    assert verdict.nodes["n6"].level is Level.INCONCLUSIVE


def test_a_slow_uplink_is_named_and_of_the_nodes_behind_it_only_the_slow_one() -> None:
    verdict, _ = judged(Faults(leaves={"leaf3": 1.3}, network={"n25": 2.0}), known=True)
    assert [(leaf.ends, leaf.level) for leaf in verdict.leaves] == [(("leaf3",), Level.SLOW)]
    assert accused(verdict) == {"n25"}


def test_a_slow_path_between_two_leaves_is_named_given_enough_rounds() -> None:
    faults = Faults(paths={frozenset({"leaf1", "leaf6"}): 1.5})
    verdict, _ = judged(faults, known=True, min_rounds=6)
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
    broken = set(planned(Localizer(nodes)).groups[0])

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


def judged_among(
    slow: Set[str],
    factor: float,
    settings: LocalizeSettings,
    weather: Weather,
    meddle: Callable[[int, GroupResult], float | None],
) -> Verdict:
    """Return the verdict where slow nodes are among well ones, and some times are other ones."""
    faults = Faults(network=dict.fromkeys(slow, factor))
    cluster = SimulatedCluster(NODES, faults=faults, weather=weather, seed=settings.seed)
    localizer = Localizer(NODES, settings=settings)
    while (round_ := localizer.next_round()) is not None:
        results = cluster.answer(round_)
        for place, result in enumerate(results):
            if ms := meddle(round_.index, result):
                results[place] = replace(result, shared_ms={"allgather": ms})
        localizer.observe(round_.index, results)
    return localizer.verdict()


@pytest.mark.parametrize("seed", range(2))
def test_slow_nodes_are_convicted_although_two_were_fast_together_once_by_chance(seed: int) -> None:
    slow = set(random.Random(seed).sample(NODES, 10))
    struck: list[GroupResult] = []

    def fast_once(_index: int, result: GroupResult) -> float | None:
        if struck or not slow >= set(result.nodes):
            return None
        struck.append(result)
        return 1.04 * ALLGATHER_MS

    settings = LocalizeSettings(seed=seed)
    verdict = judged_among(slow, 1.25, settings, Weather(noise=0.05), fast_once)

    assert struck
    assert accused(verdict) == slow
    assert not verdict.leaves


@pytest.mark.parametrize("seed", range(3, 6))
def test_spikes_that_make_two_well_nodes_alike_keep_no_slow_node_from_its_verdict(
    seed: int,
) -> None:
    hit = set(NODES[:2])
    slow = set(random.Random(seed).sample(NODES[2:], 10))

    def hit_twice(index: int, result: GroupResult) -> float | None:
        (ms,) = result.shared_ms.values()
        return 1.5 * ms if index < 2 and not hit.isdisjoint(result.nodes) else None

    settings = LocalizeSettings(seed=seed, network_floor=0.05, compute_floor=0.05)
    verdict = judged_among(slow, 1.1, settings, Weather(noise=0.02), hit_twice)

    assert accused(verdict) == slow
