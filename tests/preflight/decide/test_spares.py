# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from math import exp, inf

import pytest

from slurm_health.preflight.decide.spares import (
    LEAST_STARTS,
    RECORDED_PER_NODE_DAY,
    gamma_below,
    gamma_quantile,
    interval,
    spares_for,
)
from slurm_health.records.standings import Counted, Rates

NEVER = Counted(events=0, exposure=100_000.0, nodes=0)


def counted(events: int, exposure: float, *, clump: float = 1.0) -> Counted:
    return Counted(events=events, exposure=exposure, nodes=events, clump=clump)


def rates(starts: Counted, hours: Counted = NEVER, *, lemons: float = 0.0) -> Rates:
    return Rates(days=28, nodes=400, starts=starts, hours=hours, lemons=lemons)


@pytest.mark.parametrize(
    ("events", "low", "high"),
    [
        (0, 0.0, 3.6889),
        (1, 0.0253, 5.5716),
        (4, 1.0899, 10.2416),
        (10, 4.7954, 18.3904),
        (100, 81.3640, 121.6268),
    ],
)
def test_the_interval_of_a_count_is_that_of_published_tables(
    events: int, low: float, high: float
) -> None:
    assert interval(counted(events, 1.0)) == pytest.approx((low, high), abs=1e-4)


def test_what_nothing_was_seen_of_may_have_any_rate() -> None:
    assert interval(counted(0, 0.0)) == (0.0, inf)


def test_events_of_one_node_tell_no_more_than_one_event() -> None:
    assert interval(counted(5, 1000.0, clump=5.0)) == pytest.approx(interval(counted(1, 200.0)))


@pytest.mark.parametrize("shape", [0.5, 1.0, 4.5, 300.0, 20_000.0])
def test_a_quantile_is_where_its_probability_lies(shape: float) -> None:
    for probability in (0.025, 0.5, 0.975):
        found = gamma_below(gamma_quantile(probability, shape), shape)
        assert found == pytest.approx(probability, abs=1e-9)


def test_a_gamma_variable_of_shape_one_is_exponential() -> None:
    assert gamma_below(2.0, 1.0) == pytest.approx(1 - exp(-2.0))
    assert gamma_below(5000.0, 10.0) == 1.0
    assert gamma_below(0.0, 10.0) == 0.0


def test_spares_follow_from_the_count_as_a_reader_can_check() -> None:
    # 4 bad of 800 starts, 64 nodes. One spare: P(0) + P(1) = 0.7035 + 0.2379; two: 0.9903.
    found = spares_for(rates(counted(4, 800.0)), 64)

    assert found.count == 2
    assert found.risk == pytest.approx(1 - 0.9903, abs=1e-4)
    assert found.expected == pytest.approx(64 * 4 / 800)
    assert found.recorded == ()


def test_what_is_not_known_well_widens_what_may_be_needed() -> None:
    little, much = rates(counted(1, 200.0)), rates(counted(100, 20_000.0))

    assert spares_for(little, 64).count >= spares_for(much, 64).count
    few, many = spares_for(little, 64), spares_for(much, 64)
    assert few.most - few.fewest > many.most - many.fewest


def test_spares_that_are_kept_replace_what_fails_while_the_script_runs() -> None:
    known = rates(counted(0, 100_000.0), counted(20, 100_000.0))

    assert spares_for(known, 64).count == 0
    assert spares_for(known, 64, hours=24).count == 1
    assert spares_for(known, 64, hours=240).count == 7


def test_with_little_history_a_recorded_rate_stands_for_what_is_not_known() -> None:
    few = rates(counted(0, LEAST_STARTS - 1.0), counted(0, 10.0))

    assert spares_for(None, 64).recorded == ("starts",)
    assert spares_for(few, 64) == spares_for(None, 64)
    assert spares_for(few, 64, hours=24).recorded == ("starts", "hours")
    assert spares_for(None, 64).expected == pytest.approx(64 * RECORDED_PER_NODE_DAY)
    assert spares_for(rates(counted(0, LEAST_STARTS)), 64, hours=24).recorded == ()


def test_a_lemon_is_in_a_job_once_at_most_however_often_it_was_bad() -> None:
    without = rates(counted(0, 100_000.0))

    assert spares_for(without, 64).count == 0
    assert spares_for(rates(without.starts, lemons=0.8), 400).count == 2
    assert spares_for(rates(without.starts, lemons=0.8), 4).count == 0


def test_no_more_than_a_quarter_of_a_jobs_nodes_is_spare_and_the_risk_that_remains_is_told() -> (
    None
):
    found = spares_for(rates(counted(500, 1000.0)), 10)

    assert found.count == 3
    assert found.risk > 0.5


def test_more_nodes_and_less_risk_ask_for_no_fewer_spares() -> None:
    known = rates(counted(7, 900.0, clump=2.0), counted(3, 20_000.0))
    by_size = [spares_for(known, nodes, hours=24).count for nodes in (1, 4, 16, 64, 256, 1024)]
    by_risk = [spares_for(known, 256, risk=risk).count for risk in (0.2, 0.05, 0.01, 0.001)]

    assert by_size == sorted(by_size)
    assert by_risk == sorted(by_risk)


@pytest.mark.heavy
def test_of_many_jobs_no_more_than_the_risk_lack_a_spare() -> None:
    """The rate is unknown, and counted in 2,000 starts before each job."""
    chance, nodes, trials = random.Random(30), 128, 1500
    lacked = 0
    for _ in range(trials):
        rate = chance.choice((0.001, 0.004, 0.012))
        seen = sum(chance.random() < rate for _ in range(2000))
        spares = spares_for(rates(counted(seen, 2000.0)), nodes).count
        lacked += sum(chance.random() < rate for _ in range(nodes + spares)) > spares

    assert lacked / trials < 0.05
    assert lacked > 0
