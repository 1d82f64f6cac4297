# SPDX-License-Identifier: Apache-2.0
"""Slow uplinks and paths are named as such and cost no healthy node its place."""

from __future__ import annotations

import pytest

from slurm_health.preflight.localize.localizer import (
    GroupResult,
    Level,
    Localizer,
    LocalizeSettings,
    Outcome,
)
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster, Weather, play
from slurm_health.records.verdict import Verdict

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


def test_an_uplink_that_carries_nothing_is_faulty_and_its_nodes_are_not() -> None:
    loc = Localizer(NODES, topology=LEAVES)
    cut = set(LEAVES["leaf5"])
    while (round_ := loc.next_round()) is not None:
        loc.observe(
            round_.index,
            [
                GroupResult(
                    nodes=group,
                    outcome=Outcome.TIMED_OUT if len(cut & set(group)) == 1 else Outcome.MEASURED,
                )
                for group in round_.groups
            ],
        )
    verdict = loc.verdict()
    assert [leaf.ends for leaf in verdict.leaves] == [("leaf5",)]
    assert verdict.leaves[0].level is Level.FAULTY
    assert not accused(verdict)


def test_a_cable_between_two_good_nodes_is_a_path_and_nobody_is_blamed() -> None:
    nodes = [f"n{number}" for number in range(8)]
    loc = Localizer(nodes)
    first = loc.next_round()
    assert first is not None
    broken = set(first.groups[0])
    while (round_ := loc.next_round()) is not None:
        loc.observe(
            round_.index,
            [
                GroupResult(
                    nodes=group,
                    outcome=Outcome.TIMED_OUT if set(group) == broken else Outcome.MEASURED,
                )
                for group in round_.groups
            ],
        )
    verdict = loc.verdict()
    assert [set(path.ends) for path in verdict.paths] == [broken]
    assert verdict.paths[0].level is Level.FAULTY
    assert not accused(verdict)


def test_one_slow_card_of_two_is_named_by_its_rail() -> None:
    nodes = [f"n{number}" for number in range(8)]
    loc = Localizer(nodes)
    while (round_ := loc.next_round()) is not None:
        loc.observe(
            round_.index,
            [
                GroupResult(
                    nodes=group,
                    outcome=Outcome.MEASURED,
                    shared_ms={
                        "allgather:mlx5_0": 6.0 + round_.index / 100,
                        "allgather:mlx5_2": 12.0 if "n3" in group else 6.0 + round_.index / 100,
                    },
                )
                for group in round_.groups
            ],
        )
    found = loc.verdict().nodes["n3"]
    assert found.level is Level.SLOW
    assert found.component == "network mlx5_2"
    assert accused(loc.verdict()) == {"n3"}
