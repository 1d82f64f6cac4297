# SPDX-License-Identifier: Apache-2.0
"""Why a rank is slower than the others: what takes the time that it has over them."""

from __future__ import annotations

import pytest

from slurm_health.records.script_records import Diagnosed
from slurm_health.training.diagnosis.diagnostician import CauseDiagnostician
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.samples import RankSample
from slurm_health.training.diagnosis.stragglers import (
    SlowRank,
    Spent,
    Stragglers,
    observe_slow_rank,
)
from slurm_health.training.framework import DataManager

USUAL = Spent(own_ms=500.0, loading_ms=5.0, ran_ms=200.0, unserved_ms=20.0)


def found(spent: Spent, usual: Spent = USUAL, *, tells_loading: bool = True) -> Diagnosed:
    slow = SlowRank(rank=1, node="n2", spent=spent, usual=usual, tells_loading=tells_loading)
    diagnosed = (
        CauseDiagnostician(observe_slow_rank, OPERATORS)
        .diagnose(data_manager=DataManager([slow]))
        .diagnosed
    )
    assert diagnosed is not None
    return diagnosed


def spent(**more: float) -> Spent:
    told = {"own_ms": 800.0, "loading_ms": 5.0, "ran_ms": 200.0, "unserved_ms": 20.0}
    return Spent(**{**told, **more})


@pytest.mark.parametrize(
    ("more", "cause", "words"),
    [
        ({"loading_ms": 300.0}, "slow-data-loader", "waits for its data loader"),
        ({"unserved_ms": 330.0}, "no-processor", "others use its processors"),
        (
            {"unserved_ms": 330.0, "throttled_ms": 320.0},
            "no-processor",
            "a CPU limit holds it back",
        ),
        ({"ran_ms": 480.0}, "computes-longer", "it computes for longer"),
    ],
)
def test_what_takes_most_of_the_time_that_it_has_over_the_others_is_why(
    more: dict[str, float], cause: str, words: str
) -> None:
    diagnosed = found(spent(**more))

    assert (diagnosed.cause, diagnosed.sureness) == (cause, "likely")
    assert diagnosed.description.startswith("rank 1 on n2 is slow because")
    assert words in diagnosed.description
    assert diagnosed.evidence[0] == "it takes 800 ms of its own per step, 500 ms usual"
    assert diagnosed.advice
    assert (diagnosed.nodes, diagnosed.ranks, diagnosed.accused) == (["n2"], [1], [])


def test_where_a_rank_does_not_tell_of_its_data_that_is_advised() -> None:
    diagnosed = found(spent(), tells_loading=False)

    assert "waits for something (its data, a device" in diagnosed.description
    assert "heartbeat.loading(loader)" in diagnosed.advice


def test_a_rank_is_compared_by_how_it_spends_each_step() -> None:
    stragglers = Stragglers()
    named = []
    for window in range(7):
        steps = 10 * window
        own = {
            rank: RankSample(
                rank=rank,
                own_s=steps * (0.8 if rank == 2 else 0.5),
                own_steps=steps,
                loading_s=steps * (0.3 if rank == 2 else 0.01),
                unserved_s=steps * 0.02,
            )
            for rank in range(4)
        }
        named += stragglers.window(own)

    (slower,) = named
    assert slower.rank == 2
    assert slower.spent.loading_ms == pytest.approx(300)
    assert slower.usual.loading_ms == pytest.approx(10)
    assert slower.spent.unserved_ms == pytest.approx(slower.usual.unserved_ms)


@pytest.mark.parametrize(("times", "named"), [(1.09, []), (1.11, [2])])
def test_a_rank_is_slower_from_a_tenth_more_time_on(times: float, named: list[int]) -> None:
    stragglers = Stragglers()
    slower = []
    for window in range(7):
        steps = 10 * window
        own = {
            rank: RankSample(
                rank=rank, own_s=steps * (0.5 * times if rank == 2 else 0.5), own_steps=steps
            )
            for rank in range(4)
        }
        slower += stragglers.window(own)

    assert [each.rank for each in slower] == named
