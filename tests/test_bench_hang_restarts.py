# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of restarts after hangs runs, calls right, and does not run again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from benchmarks.hang_restarts import KINDS, OWN_KINDS, Plan, Seen, plans, wrong_with

STOPPED = Plan(number=0, kind="stopped", rank=1, step=30)
WELL = Seen(
    cause="rank-stopped",
    nodes=["n2"],
    stalled_s=33.0,
    state="COMPLETED",
    trained_on=["n1", "n3", "n4"],
    started_again=True,
)


def test_one_that_goes_on_without_the_node_where_it_hung_is_right() -> None:
    assert wrong_with(STOPPED, KINDS["stopped"], WELL) == ""


@pytest.mark.parametrize(
    "other",
    [
        {"cause": "rank-gone"},
        {"nodes": ["n3"]},
        {"state": "FAILED"},
        {"trained_on": ["n1", "n2", "n3"]},
    ],
)
def test_anything_else_is_wrong(other: dict[str, Any]) -> None:
    assert wrong_with(STOPPED, KINDS["stopped"], msgspec.structs.replace(WELL, **other))


def test_a_hang_of_the_script_is_to_end_it() -> None:
    plan = Plan(number=0, kind="loader", rank=1, step=30)
    ended = msgspec.structs.replace(
        WELL, cause="data-loader-stuck", state="FAILED", started_again=False
    )
    again = msgspec.structs.replace(ended, started_again=True)

    assert wrong_with(plan, OWN_KINDS["loader"], ended) == ""
    assert wrong_with(plan, OWN_KINDS["loader"], again)


def test_more_runs_begin_with_those_of_fewer_so_that_they_can_be_kept() -> None:
    assert plans(20, 1, KINDS)[:10] == plans(10, 1, KINDS)
    assert {each.kind for each in plans(5, 1, KINDS)} == set(KINDS)
