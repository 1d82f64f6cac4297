# SPDX-License-Identifier: Apache-2.0
"""What root reads of another user's journal."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from slurm_health.records.errors import JournalError
from slurm_health.report import others
from slurm_health.report.find import load
from slurm_health.system import journal
from tests.support.journals import RunJournal, write_healthy_run, write_requeued_job


def given_to(uid: int, *directories: Path) -> None:
    """Make another user the owner of directories and of what is in them."""
    for directory in directories:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)


@pytest.mark.root
def test_of_another_users_journal_root_is_told_the_same_and_reads_nothing_itself(
    tmp_path: Path,
) -> None:
    run = write_requeued_job(tmp_path)[-1].directory
    own = load(tmp_path, "12", now_s=2e9)
    given_to(1, run.parent)
    assert load(tmp_path, "12", now_s=2e9) == own

    with journal.path_of(run, journal.MASTER).open("ab") as file:
        file.truncate(240 << 20)  # sparse
        file.seek(0, os.SEEK_END)
        file.write(b"\n")
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    theirs = load(tmp_path, "12", now_s=2e9)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib

    assert (theirs.job, theirs.nodes, theirs.script) == (own.job, own.nodes, own.script)
    assert [run.acts for run in theirs.runs] == [run.acts for run in own.runs]
    assert grown_kib < 64 << 10


@pytest.mark.root
def test_what_another_users_journal_takes_of_memory_is_limited(tmp_path: Path) -> None:
    run = write_healthy_run(tmp_path).directory
    given_to(1, run.parent)

    with pytest.raises(JournalError, match="not read: it takes more than 4 GiB of memory"):
        others.read(run.parent, lambda: bytes(1 << 33), bytes)


def test_a_journal_that_goes_once_it_was_found_is_an_error_with_its_path(tmp_path: Path) -> None:
    gone = tmp_path / "lab" / "12"

    with pytest.raises(JournalError, match="lab/12: cannot be read: No such file"):
        others.read(gone, lambda: b"", bytes)


@pytest.mark.root
def test_what_is_wrong_with_another_users_journal_is_told_as_of_ones_own(tmp_path: Path) -> None:
    run = RunJournal(tmp_path).directory
    path = journal.path_of(run, journal.MASTER)
    path.unlink()
    path.mkdir()
    with pytest.raises(JournalError) as own:
        load(tmp_path, "12")
    given_to(1, run.parent)

    with pytest.raises(JournalError) as theirs:
        load(tmp_path, "12")

    assert str(theirs.value) == str(own.value)
