# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.fleet.retention.rules import (
    Cleaning,
    JobJournal,
    KnownJobs,
    Left,
    age_s,
    choose,
    size_bytes,
    size_text,
)

NOW_S = 1_700_000_000.0
DAY_S = 86400.0


def written(
    job: str, days_ago: float, *, size: int = 10, cluster: str = "lab", uid: int = 1
) -> JobJournal:
    return JobJournal(
        cluster=cluster, job=job, uid=uid, size_bytes=size, written_s=NOW_S - days_ago * DAY_S
    )


def chosen(
    *journals: JobJournal,
    days: float | None = None,
    size: int | None = None,
    alive: tuple[str, ...] = (),
    asked: tuple[str, ...] = ("lab",),
) -> Cleaning:
    return choose(
        journals,
        KnownJobs(alive={("lab", job) for job in alive}, asked=asked, local="local"),
        now_s=NOW_S,
        older_than_s=None if days is None else days * DAY_S,
        most_bytes=size,
    )


def jobs(found: Cleaning) -> list[str]:
    return [each.job for each in found.remove]


def test_what_is_older_goes() -> None:
    assert jobs(chosen(written("1", 31), written("2", 29), days=30)) == ["1"]


def test_the_oldest_go_until_the_rest_fits() -> None:
    found = chosen(written("1", 3), written("2", 9), written("3", 1), size=15)

    assert jobs(found) == ["2", "1"]


def test_what_age_removes_counts_for_the_size() -> None:
    assert jobs(chosen(written("1", 31), written("2", 9), days=30, size=10)) == ["1"]


def test_who_fills_the_root_removes_no_journal_of_others() -> None:
    theirs = [written(str(job), 60) for job in range(3)]
    greedy = [written("8", 2, size=10**12, uid=2), written("9", -90, size=10**12, uid=2)]

    assert jobs(chosen(*theirs, *greedy, size=100)) == ["8", "9"]
    assert jobs(chosen(*theirs, *greedy, size=100, alive=("8", "9"))) == []


def test_each_user_keeps_an_equal_share_and_what_others_leave_of_theirs() -> None:
    first = [written(f"1{ago}", ago, uid=1) for ago in range(1, 9)]
    second = [written(f"2{ago}", ago, uid=2) for ago in range(1, 9)]
    third = [written("31", 99, uid=3)]

    assert jobs(chosen(*first, *second, *third, size=110)) == ["18", "28", "17", "27", "16", "26"]


def test_who_has_many_ids_has_one_share() -> None:
    puppets = [written(str(uid), 1, uid=100_000 + uid) for uid in range(50)]
    found = choose(
        [written("7", 60, size=50), *puppets],
        KnownJobs(alive=(), asked=("lab",), local="local"),
        now_s=NOW_S,
        older_than_s=None,
        most_bytes=100,
        user_of=lambda uid: 2 if uid >= 100_000 else uid,
    )
    assert len(found.remove) == 45
    assert "7" not in jobs(found)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 100), st.integers(1, 4)), max_size=30),
    st.integers(0, 1000),
)
def test_who_takes_no_more_than_an_equal_share_loses_nothing(
    found: list[tuple[float, int, int]], size: int
) -> None:
    journals = [
        written(str(number), ago, size=taken, uid=uid)
        for number, (ago, taken, uid) in enumerate(found)
    ]
    users = {each.uid for each in journals}
    taken = {uid: sum(each.size_bytes for each in journals if each.uid == uid) for uid in users}

    losers = {each.uid for each in chosen(*journals, size=size).remove}

    assert all(taken[uid] * len(users) > size for uid in losers)


def test_the_journal_of_a_job_that_lives_stays_however_old_and_large() -> None:
    found = chosen(written("1", 900), written("2", 800), days=30, size=0, alive=("1",))

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

    assert jobs(chosen(now, before, size=0, asked=())) == ["2"]


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 100), st.booleans()), max_size=30),
    st.none() | st.floats(0, 100),
    st.none() | st.integers(0, 1000),
)
def test_no_job_that_lives_goes_and_the_limit_of_size_is_met_by_the_oldest(
    found: list[tuple[float, int, bool]], days: float | None, size: int | None
) -> None:
    journals = [
        written(str(number), ago, size=taken) for number, (ago, taken, _) in enumerate(found)
    ]
    alive = tuple(str(number) for number, (*_, lives) in enumerate(found) if lives)

    cleaning = chosen(*journals, days=days, size=size, alive=alive)

    assert not set(jobs(cleaning)) & set(alive)
    kept = [each for each in journals if each not in cleaning.remove]
    over = size is not None and sum(each.size_bytes for each in kept) > size
    assert not over or all(each.job in alive for each in kept)


@pytest.mark.parametrize(
    ("text", "seconds"), [("12h", 43200.0), ("90d", 7776000.0), (" 4w ", 2419200.0)]
)
def test_ages_are_read(text: str, seconds: float) -> None:
    assert age_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [("500MB", 500_000_000), ("20GiB", 20 << 30), ("1.5k", 1500), ("0", 0), ("10g", 10**10)],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert size_bytes(text) == count


@pytest.mark.parametrize("text", ["", "90", "-1d", "1e9d", "d", "9" * 9 + "d", "٣d"])
def test_what_is_no_age_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="90d"):
        age_s(text)


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "1.5.2G", "5PB", "inf"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="20GiB"):
        size_bytes(text)


def test_sizes_are_said_as_people_say_them() -> None:
    assert [size_text(each) for each in (0, 999, 999_999, 34_100_000)] == [
        "0 bytes",
        "999 bytes",
        "1 MB",
        "34.1 MB",
    ]
