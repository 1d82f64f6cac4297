# SPDX-License-Identifier: Apache-2.0
"""What happens in a storm, and what must hold after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.storms.judge import allowed, lateness, violations
from benchmarks.storms.look import Ran, Seen, quantile
from benchmarks.storms.plan import BACKUP, STORMS, Deed, Event, events_of

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
