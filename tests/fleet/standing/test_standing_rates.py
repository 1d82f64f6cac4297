# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from slurm_health.fleet.standing.standing import JobOnNode, NodeRecord, rates, standings
from slurm_health.records.standings import Counted, Rates

DAY_S = 86400.0


def record(node: str, *spoiled: tuple[str, ...], jobs: int = 20, hours: float = 10.0) -> NodeRecord:
    """Return a node with these jobs spoiled by these signals, a day apart."""
    return NodeRecord(
        node=node,
        jobs=jobs,
        users=1,
        spoiled=tuple(
            JobOnNode(job=str(number), time_s=number * DAY_S, uid=1000, signals=signals)
            for number, signals in enumerate(spoiled)
        ),
        ran_s=hours * 3600,
    )


def rates_of(*records: NodeRecord) -> Rates:
    return rates(records, standings(records), days=28)


def test_jobs_that_found_a_node_bad_count_per_start_and_failed_scripts_per_hour() -> None:
    found = rates_of(record("n1", ("slow",)), record("n2", ("accused",)), record("n3"))

    assert found.starts == Counted(events=1, exposure=60.0, nodes=1)
    assert found.hours == Counted(events=1, exposure=30.0, nodes=1)
    assert (found.nodes, found.days, found.lemons) == (3, 28, 0.0)


def test_a_node_that_is_found_bad_after_its_script_failed_there_counts_once() -> None:
    found = rates_of(record("n1", ("accused", "faulty")), record("n2"))

    assert (found.starts.events, found.hours.events) == (0, 1)


def test_few_nodes_with_most_of_the_events_make_them_clumps() -> None:
    often = record("n1", *[("slow",)] * 2, jobs=200)
    once = [record(f"n{number}", ("slow",), jobs=200) for number in range(2, 4)]

    found = rates_of(often, *once).starts

    assert found.events == 4
    assert found.clump == pytest.approx((4 + 1 + 1) / 4)


def test_a_lemon_counts_apart_with_its_share_of_bad_jobs() -> None:
    lemon = record("n1", *[("slow",)] * 10)
    others = [record(f"n{number}") for number in range(2, 12)]

    found = rates_of(lemon, *others)

    assert found.starts == Counted(events=0, exposure=200.0, nodes=0)
    assert found.hours.exposure == pytest.approx(100.0)
    assert found.lemons == pytest.approx(0.5)
    assert found.nodes == 11


def test_without_any_job_nothing_is_known() -> None:
    assert rates_of().starts.exposure == 0.0
