# SPDX-License-Identifier: Apache-2.0
"""Which check precedes the restart of a script."""

from __future__ import annotations

import pytest

from slurm_health.preflight.decide.check_again import check_again


def test_a_check_of_minutes_is_not_made_again_and_that_is_said() -> None:
    found = check_again("thorough", 312.4, quick="network-check")

    assert found.check == "network-check"
    assert found.less == "thorough took 312 s before, and a restart waits 120 s at most"


def test_a_check_without_a_verdict_is_not_tried_again() -> None:
    found = check_again("standard", None)

    assert (found.check, found.less) == ("quick", "standard came to no verdict before")


@pytest.mark.parametrize(("took_s", "check"), [(120.0, "thorough"), (121.0, "quick")])
def test_a_restart_waits_two_minutes_for_a_check_and_no_longer(took_s: float, check: str) -> None:
    assert check_again("thorough", took_s).check == check
