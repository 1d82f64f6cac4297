# SPDX-License-Identifier: Apache-2.0
"""How long a training may stand still before that is remarkable."""

from __future__ import annotations

from slurm_health.training.diagnosis.pace import PATIENCE, RankPace, allowance_s


def test_steps_of_a_second_may_pause_for_half_a_minute() -> None:
    assert allowance_s([RankPace(steps=50, typical_s=1.0, longest_s=1.2)]) == PATIENCE.at_least_s


def test_steps_of_ten_minutes_may_pause_for_ten_of_them() -> None:
    assert allowance_s([RankPace(steps=50, typical_s=600.0, longest_s=620.0)]) == 6000.0


def test_the_longest_pause_so_far_and_half_of_it_is_allowed_again() -> None:
    assert allowance_s([RankPace(steps=500, typical_s=1.0, longest_s=100.0)]) == 151.0


def test_before_there_is_a_pace_a_minute_or_what_steps_have_taken_so_far_is_allowed() -> None:
    paces = [
        RankPace(steps=3, typical_s=1.0, longest_s=1.0),
        RankPace(steps=50, typical_s=1, longest_s=1),
    ]

    assert allowance_s(paces) == PATIENCE.young_s
    assert allowance_s([RankPace(steps=5, typical_s=1.0, longest_s=100.0)]) == 150.0
    assert allowance_s([]) == PATIENCE.first_s
