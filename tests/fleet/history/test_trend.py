# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

import pytest

from slurm_health.fleet.standing.trend import trend

DAY_S = 86400.0


def series(*values: float) -> list[tuple[float, float]]:
    return [(number * DAY_S, value) for number, value in enumerate(values)]


def test_a_figure_that_falls_by_a_tenth_has_that_trend() -> None:
    found = trend(series(*(100 - number for number in range(11))))

    assert found is not None
    assert found.change == pytest.approx(-10 / 95)
    assert found.days == 10


def test_a_single_odd_measurement_is_no_trend() -> None:
    assert trend(series(*[100.0] * 11, 50.0)) is None


def test_a_few_points_prove_no_trend() -> None:
    assert trend(series(100, 90, 80, 70)) is None
    assert trend([]) is None


def test_noise_seldom_has_a_trend() -> None:
    choice = random.Random(4)
    noise = [series(*(choice.gauss(100, 5) for _ in range(30))) for _ in range(200)]

    assert sum(trend(each) is not None for each in noise) <= 6  # one in a hundred is expected


def test_checks_at_one_moment_have_no_trend() -> None:
    assert trend([(0.0, float(number)) for number in range(20)]) is None
