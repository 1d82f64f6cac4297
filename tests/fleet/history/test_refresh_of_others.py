# SPDX-License-Identifier: Apache-2.0
"""Journals of other users are read for the index, and cost its reader no more than its limits."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.fleet.history.read import MOST_RUNS, Others, read_job, stamp_of
from slurm_health.fleet.standing.observation import NEVER_S, JobSeen
from tests.fleet.history.test_refresh import checks_of, indexed
from tests.support.journals import write_healthy_run


def test_what_cannot_be_a_clusters_name_is_passed_over(tmp_path: Path) -> None:
    """Anybody may make a directory in a root that users share, and no text is in `\\xff`."""
    root = tmp_path / "journal"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    (root / os.fsdecode(b"\xff") / "13" / "0").mkdir(parents=True)

    assert indexed(root, tmp_path / "index") == {"n1", "n2"}


@pytest.mark.root
def test_journals_of_other_users_are_read_as_well(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    theirs = write_healthy_run(root, job=12, nodes=("n1", "n2")).directory.parent
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, 65534, 65534)

    assert indexed(root, tmp_path / "index") == {"n1", "n2"}


@pytest.mark.root
def test_no_file_of_another_user_is_looked_at_in_roots_own_process(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    for job in (12, 13):
        write_healthy_run(root, job=job, nodes=("n1", "n2"))
    theirs = root / "lab" / "12"
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, 65534, 65534)

    with opened_here() as names:
        assert {job for job, _ in checks_of(root, tmp_path / "index", "n1")} == {"12", "13"}

    assert "13" in names
    assert "12" not in names


@contextlib.contextmanager
def opened_here() -> Iterator[set[str]]:
    """Note the names of what this process opens; not what its children do."""
    names: set[str] = set()
    noting = True

    def note(event: str, args: tuple[object, ...]) -> None:
        if noting and event == "open":
            names.add(str(args[0]))

    sys.addaudithook(note)  # for good
    yield names
    noting = False


def test_of_a_job_with_any_number_of_runs_the_last_ones_are_read(tmp_path: Path) -> None:
    for label in ("0", str(MOST_RUNS)):
        write_healthy_run(tmp_path, job=12, label=label, nodes=("n1", "n2"))
    for empty in range(1, MOST_RUNS):
        (tmp_path / "lab" / "12" / str(empty)).mkdir(mode=0o700)

    seen = read_job(tmp_path, "lab", "12")

    assert [each.label for each in seen.checks] == [str(MOST_RUNS)]
    assert f"it has more than {MOST_RUNS} runs" in seen.trouble
    shutil.rmtree(tmp_path / "lab" / "12" / "0")
    assert stamp_of(tmp_path, "lab", "12") == seen.stamp


def test_a_journal_that_is_larger_than_is_read_of_another_user_says_so(tmp_path: Path) -> None:
    run = write_healthy_run(tmp_path, job=12, nodes=("n1", "n2"))

    seen = read_job(tmp_path, "lab", "12", most_bytes=1000)

    assert run.directory.exists()
    assert seen.checks == ()
    assert "it has more than 1000 bytes" in seen.trouble


def test_what_another_users_journal_takes_of_memory_is_limited() -> None:
    def takes_too_much() -> JobSeen:
        bytearray(1 << 33)
        raise AssertionError

    found = Others(Path("/nonexistent")).read(7, "stamp", takes_too_much)

    assert found is not None
    assert (found.uid, found.stamp, found.checks) == (7, "stamp", ())
    assert found.final_s == NEVER_S  # what is written there later is looked at
    assert "cannot be read within limits: MemoryError" in found.trouble


def test_a_job_of_another_user_that_could_not_be_read_is_tried_again(tmp_path: Path) -> None:
    run = write_healthy_run(tmp_path, job=12, nodes=("n1", "n2"))
    others = {("lab", "12"): 7}

    run.directory.chmod(0o777)
    refused = Others(tmp_path, others).read_if_changed(7, "lab", "12", None)
    run.directory.chmod(0o700)

    assert refused is not None
    assert "others can write" in refused.trouble
    assert refused.final_s == NEVER_S
    seen = Others(tmp_path, others).read_if_changed(7, "lab", "12", refused.stamp)
    assert seen is not None
    assert (seen.trouble, len(seen.checks)) == ("", 1)
