# SPDX-License-Identifier: Apache-2.0
"""Which check precedes a restart."""

from __future__ import annotations

import pytest

from slurm_health.preflight.decide.check_again import LIMIT_S, check_again


@pytest.mark.parametrize(
    "asked", ["straggler-detection", "standard", "thorough", "quick,straggler-detection", "values"]
)
def test_what_was_asked_for_is_checked_again(asked: str) -> None:
    found = check_again(asked, LIMIT_S)

    assert (found.check, found.less) == (asked, "")


@pytest.mark.parametrize("asked", [None, "auto", "off", "quick"])
@pytest.mark.parametrize("took_s", [None, 1.0, 1000.0])
def test_where_nothing_else_was_asked_for_the_check_is_quick_without_a_word(
    asked: str | None, took_s: float | None
) -> None:
    found = check_again(asked, took_s)

    assert (found.check, found.less) == ("quick", "")


def test_a_job_without_torch_is_checked_with_light_probes() -> None:
    assert check_again("light", 1000.0).check == "light"


def test_a_check_of_minutes_is_not_made_again_and_that_is_said() -> None:
    found = check_again("thorough", 312.4, quick="network-check")

    assert found.check == "network-check"
    assert found.less == "thorough took 312 s before, and a restart waits 120 s at most"


def test_a_check_without_a_verdict_is_not_tried_again() -> None:
    found = check_again("standard", None)

    assert (found.check, found.less) == ("quick", "standard came to no verdict before")
