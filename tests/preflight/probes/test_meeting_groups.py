# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest

from slurm_health.preflight.probes.meeting import circles


@pytest.mark.parametrize("size", range(1, 10))
def test_each_device_is_alone_first_and_then_once_with_every_other(size: int) -> None:
    of_all = [circles(rank, size) for rank in range(size)]

    assert [each[0] for each in of_all] == [[rank] for rank in range(size)]
    met = {tuple(circle) for each in of_all for circle in each[1:] if circle}
    assert met == set(itertools.combinations(range(size), 2))
    assert all(len([one for one in each[1:] if one]) == size - 1 for each in of_all)


@pytest.mark.parametrize("size", range(1, 10))
def test_in_a_turn_all_members_of_a_group_name_the_same_one(size: int) -> None:
    for turn in zip(*(circles(rank, size) for rank in range(size)), strict=True):
        for rank, circle in enumerate(turn):
            assert all(turn[member] == circle for member in circle)
            assert not circle or rank in circle
