# SPDX-License-Identifier: Apache-2.0
"""The pairs of a round."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from slurm_health.preflight.localize.pairing import (
    Pair,
    RoundRequest,
    plan_round,
    round_robin_pairs,
)


def standing(
    count: int,
    *,
    undecided: Collection[int] = (),
    trusted: Collection[int] = (),
    met: Collection[Pair] = (),
    leaf: list[int] | None = None,
    round_index: int = 1,
    seed: int = 0,
    repeats: tuple[Pair, ...] = (),
) -> RoundRequest:
    partners: list[set[int]] = [set() for _ in range(count)]
    for one, other in met:
        partners[one].add(other)
        partners[other].add(one)
    return RoundRequest(
        active=tuple(range(count)),
        risk=[0.5 if node in undecided else 0.0 for node in range(count)],
        undecided=frozenset(undecided),
        trusted=frozenset(trusted),
        met=partners,
        byes=[0] * count,
        leaf=leaf or [-1] * count,
        repeats=repeats,
        seed=seed,
        round_index=round_index,
    )


@given(st.integers(2, 30))
def test_in_a_full_circle_everybody_meets_everybody_once(count: int) -> None:
    turns = count - 1 if count % 2 == 0 else count
    pairs = [
        frozenset(pair) for turn in range(turns) for pair in round_robin_pairs(range(count), turn)
    ]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2


def test_a_suspect_meets_a_trusted_node_it_has_not_met() -> None:
    for count in (8, 40):
        suspects = {0, 1, 2}
        met = [(0, 3), (1, 4), (2, 5)]
        trusted = set(range(3, count))
        pairs = plan_round(standing(count, undecided=suspects, trusted=trusted, met=met))
        for suspect in suspects:
            (pair,) = (pair for pair in pairs if suspect in pair)
            assert len(trusted & set(pair)) == 1
            assert pair not in met


def test_the_one_who_sits_out_is_trusted() -> None:
    for count in (5, 41):
        trusted = set(range(3, count))
        pairs = plan_round(standing(count, undecided={0, 1, 2}, trusted=trusted))
        assert {0, 1, 2} <= {node for pair in pairs for node in pair}


def test_a_pair_that_is_to_be_repeated_is() -> None:
    pairs = plan_round(standing(8, trusted=range(8), met=[(2, 6)], repeats=((2, 6),)))
    assert (2, 6) in pairs


def test_the_second_round_sees_every_pair_of_eight_leaves() -> None:
    leaf = [node // 8 for node in range(64)]
    pairs = plan_round(standing(64, leaf=leaf, trusted=range(64)))
    assert len({frozenset((leaf[one], leaf[other])) for one, other in pairs}) == 28
