# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.fleet.standing import NodeRecord, SpoiledJob, at_least, standings
from slurm_health.records.standings import Reliability

DAY_S = 86400.0


def record(
    node: str,
    jobs: int,
    spoiled: int = 0,
    *,
    apart_s: float = 2 * DAY_S,
    uids: tuple[int, ...] = (1000,),
    users: int = 1,
) -> NodeRecord:
    """Return a node that spoiled so many of its jobs, one every two days."""
    return NodeRecord(
        node=node,
        jobs=jobs,
        users=users,
        spoiled=tuple(
            SpoiledJob(
                job=str(number),
                time_s=number * apart_s,
                uid=uids[number % len(uids)],
                signals=("slow",),
            )
            for number in range(spoiled)
        ),
    )


FLEET = [record(f"n{number}", jobs=20) for number in range(10)]


def level_of(found: NodeRecord, fleet: list[NodeRecord] = FLEET) -> Reliability:
    return next(each.level for each in standings([found, *fleet]) if each.node == found.node)


def test_a_node_that_spoils_jobs_on_many_days_is_a_lemon() -> None:
    worst = standings([*FLEET, record("bad", jobs=12, spoiled=4)])[0]

    assert (worst.node, worst.level) == ("bad", Reliability.LEMON)
    assert worst.evidence == ("0", "1", "2", "3")
    assert worst.reason.startswith("again and again over 6 days; by chance in 1 of ")
    assert (worst.elsewhere_spoiled, worst.elsewhere_jobs) == (0, 200)


@pytest.mark.parametrize(
    ("hours", "level"), [(23.9, Reliability.SUSPECT), (24.1, Reliability.LEMON)]
)
def test_faults_within_one_day_are_one_fault_and_no_lemon(hours: float, level: Reliability) -> None:
    apart_s = hours * 3600 / 3
    assert level_of(record("bad", jobs=12, spoiled=4, apart_s=apart_s)) is level


def test_one_users_forged_journals_hide_no_lemon() -> None:
    forged = [
        record(f"n{number}", jobs=59, spoiled=39, uids=(666,), users=2) for number in range(10)
    ]
    bad = record("bad", jobs=20, spoiled=6, uids=(1000, 1001), users=2)

    assert level_of(bad, forged) is Reliability.LEMON


def test_a_node_is_compared_with_the_others_and_not_with_perfection() -> None:
    as_bad = [record(f"n{number}", jobs=20, spoiled=5) for number in range(10)]

    assert level_of(record("bad", jobs=20, spoiled=6), as_bad) is Reliability.SUSPECT


@given(st.integers(1, 40), st.integers(0, 40), st.fractions("1/1000", "999/1000"))
def test_the_probability_is_that_of_the_binomial_distribution(
    trials: int, successes: int, rate: Fraction
) -> None:
    exact = sum(
        comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(successes, trials + 1)
    )

    assert at_least(successes, trials, float(rate)) == pytest.approx(float(exact), rel=1e-9)
