# SPDX-License-Identifier: Apache-2.0
"""Journals of other users are read as their owner, and cost the reader no more than its limits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.fleet.reading import (
    MOST_RUNS,
    NEVER_S,
    JobReading,
    JournalReader,
    KnownJob,
    read_job,
)
from slurm_health.system import journal
from tests.fleet.test_index import checks_of
from tests.support.journals import write_healthy_run

THEIRS = 65534


def give(directory: Path, uid: int = THEIRS) -> None:
    """Let all of a directory belong to another user."""
    for path in (directory, *directory.rglob("*")):
        os.chown(path, uid, uid)


def read(root: Path, uid: int, *jobs: str) -> list[JobReading | None]:
    reader = JournalReader(root)
    return [reading for _, reading in reader.read(uid, [KnownJob("lab", job) for job in jobs])]


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


@pytest.mark.root
def test_no_file_of_another_user_is_opened_in_roots_own_process(public_path: Path) -> None:
    for job in (12, 13):
        write_healthy_run(public_path, job=job, nodes=("n1", "n2"))
    (public_path / "lab").chmod(0o1777)
    give(public_path / "lab" / "12")

    with opened_here() as names:
        jobs = {job for job, _ in checks_of(public_path, public_path / "index", "n1")}

    assert jobs == {"12", "13"}
    assert "13" in names
    assert "12" not in names


@pytest.mark.root
def test_root_reads_nothing_that_the_owner_of_a_journal_may_not_read(public_path: Path) -> None:
    write_healthy_run(public_path, job=12, nodes=("n1", "n2"))
    (public_path / "lab").chmod(0o1777)
    give(public_path / "lab" / "12")
    closed = public_path / "lab" / "12" / "0" / "n1.jsonl"
    closed.chmod(0o000)

    (reading,) = read(public_path, THEIRS, "12")

    assert isinstance(reading, JobReading)
    assert "Permission denied" in reading.trouble


def test_the_last_ones_of_any_number_of_runs_are_read(tmp_path: Path) -> None:
    for label in ("0", str(MOST_RUNS)):
        write_healthy_run(tmp_path, job=12, label=label, nodes=("n1", "n2"))
    for empty in range(1, MOST_RUNS):
        (tmp_path / "lab" / "12" / str(empty)).mkdir(mode=0o700)

    reading = read_job(tmp_path, KnownJob("lab", "12"))

    assert isinstance(reading, JobReading)
    assert [check.label for check in reading.checks] == [str(MOST_RUNS)]
    assert f"it has more than {MOST_RUNS} runs" in reading.trouble
    assert read_job(tmp_path, KnownJob("lab", "12", reading.stamp)) is None


@pytest.mark.root
def test_a_journal_beyond_all_size_hides_no_other_job_of_its_owner(public_path: Path) -> None:
    for job in (12, 13):
        write_healthy_run(public_path, job=job, nodes=("n1", "n2"))
    (public_path / "lab").chmod(0o1777)
    run = public_path / "lab" / "12" / "0"
    os.truncate(journal.path_of(run, "n1"), 1 << 40)
    for directory in ("12", "13"):
        give(public_path / "lab" / directory)

    large, usual = read(public_path, THEIRS, "12", "13")

    assert isinstance(large, JobReading)
    assert isinstance(usual, JobReading)
    assert "n1.jsonl has 1099511627776 bytes" in large.trouble
    assert large.final_s == NEVER_S  # it is looked at until it can be read
    assert (usual.trouble, len(usual.checks)) == ("", 1)


# Kills whatever becomes this user, as that user could: no other test has it.
_KILLS = """
import os, signal, sys
user = int(sys.argv[1])
os.setresuid(user, user, user)
print("begun", flush=True)
while True:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(name) != os.getpid() and os.stat(f"/proc/{name}").st_uid == user:
                os.kill(int(name), signal.SIGKILL)
        except OSError:
            pass
"""
_KILLER = 61_999


@pytest.mark.root
def test_an_owner_who_kills_the_reader_hides_their_own_jobs_and_no_more(
    public_path: Path,
) -> None:
    for job in (12, 13):
        write_healthy_run(public_path, job=job, nodes=("n1", "n2"))
    (public_path / "lab").chmod(0o1777)
    give(public_path / "lab" / "12", _KILLER)
    argv = [sys.executable, "-c", _KILLS, str(_KILLER)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as killer:
        assert killer.stdout is not None
        killer.stdout.readline()
        try:
            jobs = [job for job, _ in checks_of(public_path, None, "n1")]
        finally:
            killer.kill()

    assert "13" in jobs
