# SPDX-License-Identifier: Apache-2.0

import logging
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from slurm_health.records.errors import (
    JournalError,
    SlurmHealthError,
    UsageError,
)
from slurm_health.report import find
from slurm_health.report.find import runs_of_job, tasks_asked_for, tasks_of, user_name
from slurm_health.report.read import load
from tests.support.journals import RunJournal, write_healthy_run
from tests.support.rows import rows
from tests.support.stranger import as_stranger, given_to


@rows
def test_the_runs_of_a_job_are_found_or_it_is_said_why_not(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    runs: list[str],
    others: list[str],
    last_s: dict[str, int],
    anothers: list[str],
    open_to_all: list[str],
    links: dict[str, str],
    job: str,
    cluster: str | None,
    found: list[str],
    error: str,
    logged: list[str],
) -> None:
    if anothers and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    for run in runs:
        of_cluster, of_job, label = run.split("/")
        RunJournal(tmp_path, cluster=of_cluster, job=of_job, label=label)
    for path in others:
        (tmp_path / path).mkdir(parents=True)
    for path, time_s in last_s.items():
        os.utime(tmp_path / path, (time_s, time_s))
    for path in anothers:
        given_to(65534, tmp_path / path)
    for path in open_to_all:
        (tmp_path / path).chmod(0o777)
    for path, target in links.items():
        (tmp_path / path).symlink_to(target)

    expected = pytest.raises(SlurmHealthError, match=error) if error else nullcontext()
    with caplog.at_level(logging.WARNING), expected:
        names = [str(path.relative_to(tmp_path)) for path in runs_of_job(tmp_path, job, cluster)]
        assert names == found

    assert caplog.messages == logged


@pytest.mark.parametrize("job", ["", " ", "../12", "12.batch", "12_[1-3", "١٢", "9" * 300])
def test_what_is_no_job_id_is_a_usage_error(tmp_path: Path, job: str) -> None:
    with pytest.raises(UsageError, match="is not a job id"):
        runs_of_job(tmp_path, job, None)


def test_a_task_of_an_array_is_found_by_both_of_its_ids(tmp_path: Path) -> None:
    write_healthy_run(tmp_path, job=13, array="12_3")

    assert load(tmp_path, "12_3").runs == load(tmp_path, "13").runs
    assert load(tmp_path, "13").job == "12_3"


@pytest.mark.root
def test_a_job_of_somebody_else_says_whom_to_ask(public_path: Path) -> None:
    job = write_healthy_run(public_path).directory.parent
    given_to(1, job)
    (public_path / "lab").chmod(0o1777)

    done = as_stranger("report", "12", "--journal", str(public_path))

    asked = f"job 12 belongs to user {user_name(1)}, and only {user_name(1)} may read its journal"
    assert asked in done.stderr.splitlines()[-1]


@pytest.mark.root
def test_a_journal_root_that_is_closed_to_the_user_is_named(public_path: Path) -> None:
    (public_path / "closed").mkdir(mode=0o700)

    done = as_stranger("report", "12", "--journal", str(public_path / "closed"))

    assert f"journal {public_path / 'closed'}: cannot be read: Permission denied" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 4


def test_a_job_has_the_id_of_its_directory(tmp_path: Path) -> None:
    write_healthy_run(tmp_path, job=99)
    (tmp_path / "lab" / "99").rename(tmp_path / "lab" / "12")
    write_healthy_run(tmp_path, job=98, array="77_1")
    (tmp_path / "lab" / "77_1").unlink()

    assert load(tmp_path, "12").job == "12"
    assert load(tmp_path, "98").job == "98"


@pytest.mark.root
def test_the_name_of_a_task_that_another_has_laid_leads_nowhere(tmp_path: Path) -> None:
    write_healthy_run(tmp_path, job=13)
    link = tmp_path / "lab" / "12_3"
    link.symlink_to("13")
    os.chown(link, 1, 1, follow_symlinks=False)

    with pytest.raises(JournalError, match=r"12_3 there was made by user .*its own job id"):
        load(tmp_path, "12_3")
    assert load(tmp_path, "13").job == "13"


@pytest.mark.root
def test_whoever_else_has_a_journal_of_the_job_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = write_healthy_run(tmp_path).directory.parent
    beside = job.with_name(f"12.{'0' * 16}")
    beside.mkdir(mode=0o700)
    os.chown(beside, 2, 2)
    given_to(1, job)

    load(tmp_path, "12")

    name = user_name(2)
    assert caplog.messages == [
        f"the journal of job 12 was written by user {user_name(1)}",
        f"user {name} has one of job 12 too: sudo -u {name} slurm-health report 12",
    ]


@pytest.fixture
def array(tmp_path: Path) -> Path:
    """Lay down an array of four tasks; the last one has the array's own id, as Slurm does it."""
    for job, task in ((13, 1), (14, 2), (15, 10), (12, 11)):
        write_healthy_run(tmp_path, job=job, array=f"12_{task}")
    return tmp_path


@rows
def test_an_array_stands_for_its_tasks_with_a_journal(
    array: Path, named: str, tasks: list[str], error: str
) -> None:
    with pytest.raises(SlurmHealthError, match=error) if error else nullcontext():
        assert tasks_of(array, named) == tasks


def test_journals_that_cannot_be_listed_are_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "lab").symlink_to("lab")  # a loop: not even root can read it
    assert tasks_of(tmp_path, "12") == []
    with pytest.raises(JournalError, match="cannot be read"):
        tasks_of(tmp_path, "12_[1-4]")


@rows
def test_the_tasks_that_are_asked_for_are_known(
    named: str, array: str, tasks: set[int] | None
) -> None:
    assert tasks_asked_for(named) == (array, tasks)


@pytest.mark.root
def test_links_of_others_make_no_array_of_ones_job(tmp_path: Path) -> None:
    write_healthy_run(tmp_path)
    link = tmp_path / "lab" / "12_1"
    link.symlink_to("55")
    os.chown(link, 1, 1, follow_symlinks=False)

    assert tasks_of(tmp_path, "12") == []


@pytest.mark.root
def test_a_machine_says_where_the_journal_of_a_job_is(tmp_path: Path) -> None:
    there = find.Elsewhere(host="first\x1b[31m", directory="/home/alice/torchrun/7/0-2")
    find.note_elsewhere(tmp_path, "torchrun", 7, there)
    assert find.elsewhere_text(tmp_path, "7") == (
        "it is on first [31m, in /home/alice/torchrun/7/0-2: run slurm-health report 7 there."
    )
    assert find.elsewhere_text(tmp_path, "8") == ""
    given_to(1, tmp_path / "torchrun" / "7")  # another's note does not count
    assert find.elsewhere_text(tmp_path, "7") == ""
    given_to(os.geteuid(), tmp_path / "torchrun" / "7")
    assert find.elsewhere_text(tmp_path, "7")
    (note,) = (path for path in tmp_path.rglob("*") if path.is_file())
    note.write_bytes(b'{"x":' + b"[" * 100_000)
    assert find.elsewhere_text(tmp_path, "7") == ""
    assert find.elsewhere_text(tmp_path / "none", "7") == ""
