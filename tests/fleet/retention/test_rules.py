# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from slurm_health.fleet.retention.rules import (
    Cleaning,
    JobJournal,
    KnownJobs,
    Left,
    age_s,
    choose,
    size_text,
)

NOW_S = 1_700_000_000.0
DAY_S = 86400.0


def written(job: str, days_ago: float, *, cluster: str = "lab") -> JobJournal:
    return JobJournal(
        cluster=cluster, job=job, uid=1, size_bytes=10, written_s=NOW_S - days_ago * DAY_S
    )


def chosen(
    *journals: JobJournal,
    days: float,
    alive: tuple[str, ...] = (),
    asked: tuple[str, ...] = ("lab",),
) -> Cleaning:
    return choose(
        journals,
        KnownJobs(alive={("lab", job) for job in alive}, asked=asked, local="local"),
        now_s=NOW_S,
        older_than_s=days * DAY_S,
    )


def jobs(found: Cleaning) -> list[str]:
    return [each.job for each in found.remove]


def test_what_is_older_goes_the_oldest_first() -> None:
    assert jobs(chosen(written("3", 31), written("1", 32), written("2", 29), days=30)) == ["1", "3"]


def test_the_journal_of_a_job_that_lives_stays_however_old() -> None:
    found = chosen(written("1", 900), written("2", 800), days=30, alive=("1",))

    assert jobs(found) == ["2"]
    assert [each.job for each in found.left[Left.ALIVE]] == ["1"]


def test_a_journal_beside_a_taken_name_is_of_a_job_that_lives() -> None:
    beside = written("12.0123456789abcdef", 100)
    assert jobs(chosen(beside, days=90, alive=("12",))) == []


def test_a_job_of_another_cluster_with_the_id_of_one_that_lives_is_another_job() -> None:
    other = written("1", 90, cluster="old")

    assert jobs(chosen(other, days=30, alive=("1",))) == ["1"]


def test_where_slurm_cannot_be_asked_sixty_days_stay() -> None:
    found = chosen(written("1", 61), written("2", 59), days=30, asked=())

    assert jobs(found) == ["1"]
    assert [each.job for each in found.left[Left.UNASKED]] == ["2"]


def test_a_check_without_slurm_stays_for_an_hour() -> None:
    now, before = written("1", 0.01, cluster="local"), written("2", 0.1, cluster="local")

    assert jobs(chosen(now, before, days=0, asked=())) == ["2"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("12h", 43200.0), ("90d", 7776000.0), (" 4w ", 2419200.0)]
)
def test_ages_are_read(text: str, seconds: float) -> None:
    assert age_s(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "-1d", "1e9d", "d", "9" * 9 + "d", "٣d"])
def test_what_is_no_age_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="90d"):
        age_s(text)


def test_sizes_are_said_as_people_say_them() -> None:
    assert [size_text(each) for each in (0, 999, 999_999, 34_100_000)] == [
        "0 bytes",
        "999 bytes",
        "1 MB",
        "34.1 MB",
    ]
