# SPDX-License-Identifier: Apache-2.0
"""Slow uplinks and paths are named as such and cost no healthy node its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_health.preflight.localize.localizer import (
    GroupResult,
    Level,
    Localizer,
    LocalizeSettings,
    Outcome,
)
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster, Weather, play
from slurm_health.records.probe_catalog import Metric
from slurm_health.records.verdict import Verdict
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
