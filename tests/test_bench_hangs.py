# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of hangs calls right."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.hangs import CAUSES, Hang, judged, plans, table


def record(cause: str, nodes: list[str], ranks: list[int], stalled_s: float = 33.0) -> Any:
    found = {"cause": cause, "description": "it", "nodes": nodes, "ranks": ranks}
    return {"stalled_s": stalled_s, "found": found}


def hang(cause: str, heartbeat: bool = True) -> Hang:
    return Hang(seed=1, number=0, cause=cause, rank=1, step=30, heartbeat=heartbeat)


def wrong(cause: str, told: Any, heartbeat: bool = True) -> str:
    return judged(hang(cause, heartbeat), CAUSES[cause], told).wrong


def test_the_right_rank_node_and_cause_within_a_minute_are_right() -> None:
    assert wrong("stopped", record("rank-stopped", ["n2"], [1])) == ""
    assert wrong("network", record("network-of-group", ["n2"], [])) == ""


@pytest.mark.parametrize(
    "told",
    [
        record("rank-gone", ["n2"], [1]),
        record("rank-stopped", ["n1", "n2"], [1]),
        record("rank-stopped", ["n2"], [0]),
        record("rank-stopped", ["n2"], [1], stalled_s=61.0),
        {"stalled_s": 33.0, "found": {"cause": "rank-stopped", "description": "it"}},
    ],
)
def test_anything_else_is_wrong(told: Any) -> None:
    assert wrong("stopped", told)


def test_without_a_heartbeat_it_may_take_minutes() -> None:
    told = record("file-awaited", ["n2"], [1], stalled_s=230.0)

    assert wrong("loader", told, heartbeat=False) == ""


def test_the_table_counts_by_cause() -> None:
    runs = [judged(hang("stopped"), CAUSES["stopped"], record("rank-stopped", ["n2"], [1]))]
    runs.append(judged(hang("stopped"), CAUSES["stopped"], record("rank-gone", ["n2"], [1])))

    assert "1 of 2" in table(runs)


def test_more_runs_begin_with_those_of_fewer_so_that_they_can_be_kept() -> None:
    few, more = (plans([*CAUSES], runs, 1, heartbeat=True) for runs in (2, 4))

    assert more[: len(few)] == few
    assert plans(["network"], 2, 1, heartbeat=True) == [
        each for each in few if each.cause == "network"
    ]
