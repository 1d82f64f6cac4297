# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.records.errors import JournalError, RunNotFound, UsageError
from slurm_health.report import find
from slurm_health.report.find import runs_of_job, tasks_asked_for, tasks_of, user_name
from slurm_health.report.read import load
from slurm_health.system import journal
from tests.cases import cases
from tests.support.journals import RunJournal, write_healthy_run
from tests.support.stranger import as_stranger, given_to


def test_the_runs_of_a_job_are_listed_oldest_first(tmp_path: Path) -> None:
    for label in ("10", "0-2", "2", "0", "0-10", "1"):
        RunJournal(tmp_path, job=12, label=label)

    found = runs_of_job(tmp_path, "12", None)

    assert [path.name for path in found] == ["0", "0-2", "0-10", "1", "2", "10"]


def test_what_is_no_run_is_not_listed(tmp_path: Path) -> None:
    RunJournal(tmp_path, job=12, label="0")
    (tmp_path / "lab" / "12" / "notes").mkdir()
    (tmp_path / "lab" / "12" / "1.lock").touch()
    (tmp_path / "lab" / "12" / "2").touch()
    (tmp_path / "README").touch()

    assert [path.name for path in runs_of_job(tmp_path, "12", None)] == ["0"]


def test_a_task_of_an_array_is_found_by_both_of_its_ids(tmp_path: Path) -> None:
    write_healthy_run(tmp_path, job=13, array="12_3")

    assert load(tmp_path, "12_3").runs == load(tmp_path, "13").runs
    assert load(tmp_path, "13").job == "12_3"


def test_an_unknown_job_names_the_newest_ones(tmp_path: Path) -> None:
    for age, job in enumerate((21, 9, 17)):
        directory = RunJournal(tmp_path, job=job).directory.parent
        os.utime(directory, (1000 - age, 1000 - age))

    with pytest.raises(RunNotFound, match=r"job 12 under .* \(newest there: 21, 9, 17\)"):
        runs_of_job(tmp_path, "12", None)


def test_an_unknown_array_names_its_tasks(tmp_path: Path) -> None:
    RunJournal(tmp_path, job=14)
    RunJournal(tmp_path, job=13)
    (tmp_path / "lab" / "12_3").symlink_to("13")

    with pytest.raises(RunNotFound, match=r"\(newest there: 12_3\)"):
        runs_of_job(tmp_path, "12", None)


@pytest.mark.parametrize("root", ["nowhere", "."])
def test_a_root_that_is_not_there_or_has_a_job_without_a_run_has_no_job(
    tmp_path: Path, root: str
) -> None:
    (tmp_path / "lab" / "12").mkdir(parents=True)

    with pytest.raises(RunNotFound, match="was it submitted with slurm-health sbatch"):
        runs_of_job(tmp_path / root, "12", None)


WORDS = ("", " ", "abc", "../12", "12/0", "12.batch", "12_", "_3", "12_[a]", "12_[1-3", "-12", "١٢")


@pytest.mark.parametrize("job", [*WORDS, "9" * 300])
def test_what_is_no_job_id_is_a_usage_error(tmp_path: Path, job: str) -> None:
    with pytest.raises(UsageError, match="is not a job id"):
        runs_of_job(tmp_path, job, None)


def test_of_two_clusters_the_wanted_one_is_preferred(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for cluster in ("east", "west"):
        RunJournal(tmp_path, cluster=cluster, job=12)

    with caplog.at_level(logging.WARNING):
        found = runs_of_job(tmp_path, "12", "west")

    assert found == [tmp_path / "west" / "12" / "0"]
    assert caplog.messages == [
        "showing job 12 of cluster west; there is one of that id on east too"
    ]


@pytest.mark.parametrize("forged", [False, True])
def test_of_two_clusters_the_one_of_ones_own_that_it_ran_on_last_is_taken(
    tmp_path: Path, forged: bool
) -> None:
    for cluster, changed_s in (("east", 2000), ("west", 1000)):
        run = RunJournal(tmp_path, cluster=cluster, job=12)
        os.utime(journal.path_of(run.directory, journal.MASTER), (changed_s, changed_s))
    if forged:
        another(tmp_path / "east")

    own = "west" if forged else "east"
    assert runs_of_job(tmp_path, "12", None) == [tmp_path / own / "12" / "0"]


def test_a_job_that_only_other_clusters_have_is_not_that_of_the_named_one(tmp_path: Path) -> None:
    for cluster in ("east", "west"):
        RunJournal(tmp_path, cluster=cluster, job=12)

    told = "its cluster there is east or west, not north: see --cluster=east"
    with pytest.raises(RunNotFound, match=told) as caught:
        runs_of_job(tmp_path, "12", "north")

    assert caught.value.clusters == ("east", "west")


def test_a_job_of_the_named_cluster_that_cannot_be_read_is_not_told_as_one_of_another(
    tmp_path: Path,
) -> None:
    for cluster in ("east", "west"):
        RunJournal(tmp_path, cluster=cluster, job=12)
    (tmp_path / "east" / "12").chmod(0o777)

    with pytest.raises(JournalError, match="cannot be read"):
        runs_of_job(tmp_path, "12", "east")


def test_where_several_clusters_have_anothers_job_one_must_be_named(tmp_path: Path) -> None:
    for cluster in ("east", "west"):
        RunJournal(tmp_path, cluster=cluster, job=12)
        another(tmp_path / cluster)
    with pytest.raises(UsageError, match="--cluster=east, west"):
        runs_of_job(tmp_path, "12", None)
    assert runs_of_job(tmp_path, "12", "west") == [tmp_path / "west" / "12" / "0"]


def test_a_directory_that_is_no_clusters_name_is_not_looked_into(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RunJournal(tmp_path, cluster="lab", job=12)
    RunJournal(tmp_path, cluster="x\x1b[2Jy", job=12)
    assert runs_of_job(tmp_path, "12", None) == [tmp_path / "lab" / "12" / "0"]
    assert caplog.messages == []


def another(directory: Path) -> None:
    """Give a directory and what is below it to another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    given_to(65534, directory)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Make a directory that every user can reach: those of pytest are closed to others."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.root
def test_a_job_of_somebody_else_says_whom_to_ask(shared: Path) -> None:
    job = write_healthy_run(shared).directory.parent
    given_to(1, job)
    (shared / "lab").chmod(0o1777)

    done = as_stranger("report", "12", "--journal", str(shared))

    asked = f"job 12 belongs to user {user_name(1)}, and only {user_name(1)} may read its journal"
    assert asked in done.stderr.splitlines()[-1]


@pytest.mark.root
def test_a_journal_root_that_is_closed_to_the_user_is_named(shared: Path) -> None:
    (shared / "closed").mkdir(mode=0o700)

    done = as_stranger("report", "12", "--journal", str(shared / "closed"))

    assert f"journal {shared / 'closed'}: cannot be read: Permission denied" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 4


def test_what_another_laid_ready_is_an_error_and_hides_nothing(tmp_path: Path) -> None:
    for cluster in ("east", "west"):
        RunJournal(tmp_path, cluster=cluster, job=12)
    (tmp_path / "east" / "12").chmod(0o777)

    assert runs_of_job(tmp_path, "12") == [tmp_path / "west" / "12" / "0"]

    (tmp_path / "west" / "12").rename(tmp_path / "west" / "13")
    (tmp_path / "west" / "12").symlink_to("../east")
    with pytest.raises(JournalError, match="cannot be read"):
        runs_of_job(tmp_path, "12")


@pytest.mark.root
def test_whose_journal_it_is_is_said_where_it_is_anothers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_healthy_run(tmp_path)
    job = run.directory.parent
    given_to(1, job)

    load(tmp_path, "12")

    assert caplog.messages == [f"the journal of job 12 was written by user {user_name(1)}"]


def test_a_job_is_the_one_whose_directory_it_has_whatever_its_records_claim(
    tmp_path: Path,
) -> None:
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
    assert caplog.messages[1:] == [
        f"user {name} has one of job 12 too: sudo -u {name} slurm-health report 12"
    ]


@pytest.mark.root
def test_where_a_journal_is_anothers_note_does_not_say(tmp_path: Path) -> None:
    note = find.Elsewhere(host="n9", directory="/journal")
    find.note_elsewhere(tmp_path, "lab", 12, note)
    assert find.elsewhere_text(tmp_path, "12").startswith("it is on n9, in /journal")

    given_to(1, tmp_path / "lab" / "12")
    assert find.elsewhere_text(tmp_path, "12") == ""


@pytest.fixture
def array(tmp_path: Path) -> Path:
    """Lay down an array of four tasks; the last one has the array's own id, as Slurm does it."""
    for job, task in ((13, 1), (14, 2), (15, 10), (12, 11)):
        write_healthy_run(tmp_path, job=job, array=f"12_{task}")
    return tmp_path


@cases("report/find.toml")
def test_an_array_stands_for_its_tasks_with_a_journal(
    array: Path, named: str, tasks: list[str]
) -> None:
    assert tasks_of(array, named) == tasks


@cases("report/find.toml")
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


def test_tasks_without_a_journal_are_not_found(array: Path) -> None:
    with pytest.raises(RunNotFound, match=r"job 12_\[3-9\] under .* \(newest there: 12_"):
        tasks_of(array, "12_[3-9]")


def test_journals_that_cannot_be_listed_are_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "lab").symlink_to("lab")  # a loop: not even root can read it
    assert tasks_of(tmp_path, "12") == []
    with pytest.raises(JournalError, match="cannot be read"):
        tasks_of(tmp_path, "12_[1-4]")


def test_a_machine_says_where_the_journal_of_a_job_is(tmp_path: Path) -> None:
    there = find.Elsewhere(host="first\x1b[31m", directory="/home/alice/torchrun/7/0-2")
    find.note_elsewhere(tmp_path, "torchrun", 7, there)
    assert find.elsewhere_text(tmp_path, "7") == (
        "it is on first [31m, in /home/alice/torchrun/7/0-2: run slurm-health report 7 there."
    )
    assert find.elsewhere_text(tmp_path, "8") == ""
    (note,) = (path for path in tmp_path.rglob("*") if path.is_file())
    note.write_bytes(b'{"x":' + b"[" * 100_000)
    assert find.elsewhere_text(tmp_path, "7") == ""
    assert find.elsewhere_text(tmp_path / "none", "7") == ""
