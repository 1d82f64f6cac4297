# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slurm_health import journal
from slurm_health.core.records import Disposition, Record, RunFinished, RunStarted
from slurm_health.errors import JournalError
from tests.support.journals import Clock

STARTED = RunStarted(
    run_id="now",
    job_id=12,
    attempt=0,
    cluster="lab",
    partition="main",
    nodes=["n1", "n2"],
    master_node="n1",
    user="ml",
    start_time_s=1000,
)


def write(root: Path, label: str, *records: Record) -> Path:
    directory = journal.job_directory(root, "lab", 12) / label
    journal.create(directory, [journal.MASTER])
    journal.Writer(directory, journal.MASTER, Clock()).append(*records)
    return directory


def before(**changes: object) -> RunStarted:
    return msgspec.structs.replace(STARTED, run_id="before", **changes)


def finished(disposition: str) -> RunFinished:
    return RunFinished(disposition=Disposition(disposition), exit_code=1)


def test_the_first_check_of_an_attempt_has_the_attempts_number(tmp_path: Path) -> None:
    directory, started = journal.directory_of_check(tmp_path, STARTED)

    assert directory == tmp_path / "lab" / "12" / "0"
    assert started is STARTED


def test_an_attempt_after_a_requeue_has_a_directory_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "0", before(), finished("requeue"))
    again = msgspec.structs.replace(STARTED, attempt=1)

    assert journal.directory_of_check(tmp_path, again) == (tmp_path / "lab" / "12" / "1", again)


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    directory = write(tmp_path, "0")

    assert journal.directory_of_check(tmp_path, STARTED) == (directory, STARTED)


def test_a_check_that_was_cut_short_is_gone_on_with(tmp_path: Path) -> None:
    directory = write(tmp_path, "0", before())

    assert journal.directory_of_check(tmp_path, STARTED) == (directory, before())


def test_a_check_whose_requeue_did_not_happen_is_gone_on_with(tmp_path: Path) -> None:
    directory = write(tmp_path, "0", before(), finished("requeue"))

    assert journal.directory_of_check(tmp_path, STARTED) == (directory, before())


@pytest.mark.parametrize("disposition", ["proceed", "stop"])
def test_a_second_check_in_the_same_job_does_not_touch_the_first(
    tmp_path: Path, disposition: str
) -> None:
    write(tmp_path, "0", before(), finished(disposition))
    write(tmp_path, "0-2", before(), finished(disposition))

    directory, started = journal.directory_of_check(tmp_path, STARTED)

    assert (directory.name, started) == ("0-3", STARTED)


def test_a_check_that_ended_unheard_is_told_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, "0", before(), finished("proceed"))  # a start before, or the script's own check
    directory = write(tmp_path, "0-2", STARTED, finished("proceed"))
    fewer = msgspec.structs.replace(STARTED, nodes=["n1"])

    assert journal.directory_of_check(tmp_path, fewer) == (directory, STARTED)


@pytest.mark.parametrize(
    "change", [{"nodes": ["n1", "n3"]}, {"user": "other"}, {"start_time_s": 999}]
)
def test_an_older_job_with_the_same_id_is_not_gone_on_with(
    tmp_path: Path, change: dict[str, object]
) -> None:
    write(tmp_path, "0", before(**change))

    directory, started = journal.directory_of_check(tmp_path, STARTED)

    assert (directory.name, started) == ("0-2", STARTED)


def test_an_array_task_is_found_under_the_id_its_user_knows(tmp_path: Path) -> None:
    started = msgspec.structs.replace(STARTED, array="11_3")
    directory = write(tmp_path, "0", started)

    journal.link_array_task(tmp_path, started)
    journal.link_array_task(tmp_path, started)

    assert (tmp_path / "lab" / "11_3" / "0").samefile(directory)


def test_an_array_task_that_cannot_be_linked_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "lab").touch()

    with pytest.raises(JournalError, match="cannot be written"):
        journal.link_array_task(tmp_path, msgspec.structs.replace(STARTED, array="11_3"))
