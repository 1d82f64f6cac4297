# SPDX-License-Identifier: Apache-2.0
"""Nodes that are a tenth slower, where a site asks for that, are found: another round decides."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.preflight.localize.localizer import (
    GroupResult,
    Level,
    Localizer,
    LocalizeSettings,
    Outcome,
)
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster, Weather, play
from slurm_health.preflight.localize.stopping import chance_of_so_many
from tests.preflight.localize.test_localizer import accused, planned

NODES = [f"n{number}" for number in range(64)]


@pytest.mark.parametrize("seed", [1008, 1017, 1056])
def test_six_pairs_of_which_none_lies_far_out_are_odd_together(seed: int) -> None:
    slow = random.Random(f"faults {seed}").sample(NODES, 6)
    faults = Faults(network=dict.fromkeys(slow, 1.1))
    cluster = SimulatedCluster(NODES, faults=faults, weather=Weather(), seed=seed)
    settings = LocalizeSettings(network_floor=0.05, compute_floor=0.05, seed=seed)

    verdict, _ = play(Localizer(NODES, settings=settings), cluster)

    assert accused(verdict) == set(slow)


@given(tests=st.integers(1, 40), found=st.integers(0, 40), share=st.floats(0.0, 1.0))
def test_the_chance_of_so_many_is_that_of_the_binomial_distribution(
    tests: int, found: int, share: float
) -> None:
    found = min(found, tests)
    terms = (
        math.comb(tests, each) * share**each * (1 - share) ** (tests - each)
        for each in range(found, tests + 1)
    )

    assert chance_of_so_many(found, tests, share) == pytest.approx(min(1.0, sum(terms)), abs=1e-9)


@pytest.mark.parametrize(("count", "is_accused"), [(64, True), (4096, False)])
def test_the_unluckiest_of_thousands_is_not_accused_of_what_accuses_one_of_a_few(
    count: int, is_accused: bool
) -> None:
    rng = random.Random(0)
    slow = {f"n{number}" for number in range(count // 100 + 1)}  # so slow ones are likely
    lasting = {f"n{number}": rng.gauss(0, 0.01) for number in range(count)}
    lasting |= dict.fromkeys(slow, math.log(1.12))
    settings = LocalizeSettings(compute_floor=0.05, alone=True, min_rounds=3)
    localizer = Localizer(list(lasting), settings=settings)
    for number in range(3):
        round_ = planned(localizer)
        times = {node: 3.0 * math.exp(own + rng.gauss(0, 0.02)) for node, own in lasting.items()}
        times["n50"] = 3.0 * math.exp(0.07)
        localizer.observe(number, [
            GroupResult(nodes=group, outcome=Outcome.MEASURED,
                        node_ms={"matmul": {group[0]: times[group[0]]}})
            for group in round_.groups
        ])  # fmt: skip

    found = set(localizer.verdict().named(Level.SLOW))

    assert found == slow | ({"n50"} if is_accused else set())
