# SPDX-License-Identifier: Apache-2.0
"""What happens in a storm, and what must hold after it."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.storms.judge import allowed, lateness, violations
from benchmarks.storms.look import Ran, Seen, quantile
from benchmarks.storms.plan import BACKUP, STORMS, Deed, Event, events_of
from benchmarks.storms.runners import can_compile, install

NODES = [f"n{number + 1}" for number in range(40)]
OURS = "shealth:flag /tmp/broken exists check=flag job=7 t=1 [root@2026-01-02T03:04:05]"
BROKEN = [Event(at_s=1, deed=Deed.BREAK, nodes=tuple(NODES[1:13]))]


def seen(**changed: object) -> Seen:
    """Return what a storm leaves where all went as it should."""
    well = Seen(
        drained=dict.fromkeys(NODES[1:5], OURS),
        tripped=["main"],
        submitted={1, 2},
        ended={1: ("COMPLETED", "None"), 2: ("COMPLETED", "None")},
        ran=[Ran(hook="prolog", node="n2", at_s=1, wall_s=0.2, cpu_s=0.1, code=1)],
    )
    return replace(well, **changed)  # type: ignore[arg-type]


def wrong(name: str = "third", /, **changed: object) -> str:
    return "\n".join(violations(STORMS[name], NODES, BROKEN, seen(**changed)))


@pytest.mark.parametrize("name", STORMS)
def test_a_seed_comes_to_the_same_storm_again(name: str) -> None:
    first = events_of(STORMS[name], NODES, seed=3)

    assert first == events_of(STORMS[name], NODES, seed=3)
    assert list(first) == sorted(first, key=lambda event: event.at_s)


def test_the_backup_is_never_broken() -> None:
    assert all(
        BACKUP not in event.nodes
        for seed in range(50)
        for event in events_of(STORMS["failover"], NODES, seed=seed)
    )


def test_three_in_ten_are_three_in_ten() -> None:
    events = events_of(STORMS["third"], NODES, seed=1)

    assert len({node for event in events for node in event.nodes}) == 12
    assert all(event.at_s <= 60 for event in events)


def test_as_many_may_be_drained_as_the_breaker_says() -> None:
    assert allowed(STORMS["third"], NODES) == 4
    assert allowed(STORMS["rack"], NODES) == 3


def test_a_storm_that_went_as_it_should_violates_nothing() -> None:
    assert wrong() == ""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"drained": dict.fromkeys(NODES[1:6], OURS)}, "5 nodes are drained, limit 4"),
        ({"drained": {"n20": OURS}}, "n20 was drained and is well"),
        ({"drained": {"n2": "Prolog error"}}, "n2 was drained by Slurm: Prolog error"),
        ({"tripped": []}, "the breaker has not tripped"),
        ({"ended": {1: ("COMPLETED", "None")}}, "job 2 is UNKNOWN"),
        (
            {"ended": {1: ("COMPLETED", ""), 2: ("PENDING", "launch_failed_requeued_held")}},
            "job 2 is PENDING (launch_failed_requeued_held)",
        ),
        ({"still_out": {"n3": "IDLE+DRAIN"}}, "n3 is not back: IDLE+DRAIN"),
        (
            {"ran": [Ran(hook="prolog", node="n9", at_s=1, wall_s=1, cpu_s=1, code=127)]},
            "a prolog of n9 ended with 127",
        ),
    ],
)
def test_what_must_not_be_is_said(changed: dict[str, object], said: str) -> None:
    assert said in wrong(**changed)


def test_no_breaker_need_trip_for_what_one_users_jobs_have_found() -> None:
    beyond = ["n2", "n3", "n4", "n5", "n6"]
    alice, bob = 1000, 1001

    assert wrong(tripped=[], found_by=dict.fromkeys(beyond, alice)) == ""
    of_two = {"n2": alice, "n3": alice, "n4": alice, "n5": bob, "n6": -1}
    assert "the breaker has not tripped" in wrong(tripped=[], found_by=of_two)
    few = dict.fromkeys(beyond[:4], alice)
    assert "the breaker has not tripped" in wrong(tripped=[], found_by=few)


@pytest.mark.skipif(not can_compile(), reason="needs a C compiler")
def test_a_clock_that_is_ahead_changes_no_sleep_and_no_duration(tmp_path: Path) -> None:
    install("empty", tmp_path, tmp_path)
    said = (
        "import time; s = time.monotonic(); time.sleep(0.01); print(time.time(), s, time.time_ns())"
    )
    environ = {"LD_PRELOAD": str(tmp_path / "ahead.so")}
    before_s = time.time()
    ran = subprocess.run(
        [sys.executable, "-I", "-c", said], env=environ, capture_output=True, text=True, check=True
    )
    ahead_s, monotonic_s, ahead_ns = map(float, ran.stdout.split())

    assert 3600 <= ahead_s - before_s < 3660
    assert 3600 <= ahead_ns / 1e9 - before_s < 3660
    assert 0 <= time.monotonic() - monotonic_s < 60


def test_a_message_from_a_node_that_is_well_is_one_too_many() -> None:
    quiet: dict[str, object] = {"drained": {}, "tripped": [], "ran": []}

    def said(sent: int) -> list[str]:
        return violations(
            STORMS["well"], NODES, [], seen(**quiet, messages={"REQUEST_NODE_INFO": sent})
        )

    assert said(0) == []
    assert "1 messages to slurmctld, of 0 at most" in said(1)[0]


def test_each_node_that_breaks_may_cost_as_many_messages_as_a_drain() -> None:
    most = 8 * (12 + 1)  # twelve break, one prolog failed

    assert wrong(messages={"REQUEST_NODE_INFO": most}) == ""
    assert f"of {most} at most" in wrong(messages={"REQUEST_NODE_INFO": most + 1})


def test_a_breaker_that_trips_late_is_late_and_not_wrong() -> None:
    assert lateness(seen(trip_took_s={"main": 4.0})) == []
    assert "took 9.0 s" in lateness(seen(trip_took_s={"main": 9.0}))[0]
    assert wrong(trip_took_s={"main": 9.0}) == ""


def test_a_share_of_runs_that_took_no_longer() -> None:
    assert quantile([], 0.99) == 0
    assert quantile([float(number) for number in range(100)], 0.99) == 99
