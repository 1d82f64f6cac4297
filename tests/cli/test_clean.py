# SPDX-License-Identifier: Apache-2.0
"""`slurm-health clean` as it is called. No Slurm answers here; the lab has one that does."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from slurm_health.fleet.clean import journals as own_journals
from slurm_health.fleet.clean import remove
from slurm_health.records.records import JobOutcome
from slurm_health.system import journal as journals
from tests.cli.terminal import terminal
from tests.support.command_line import Done, slurm_health
from tests.support.journals import Clock, write_healthy_run, write_requeued_job
from tests.support.stranger import given_to

DAY_S = 86400.0
NOBODY = 65534


def write(root: Path, job: int, days_ago: float, *, array: str = "") -> Path:
    """Write a job's journal as it would be after so many days."""
    directory = write_healthy_run(root, job=job, array=array, nodes=("n1", "n2")).directory.parent
    age(directory, days_ago)
    return directory


def age(directory: Path, days_ago: float) -> None:
    written_s = time.time() - days_ago * DAY_S
    for path in (*directory.rglob("*"), directory):
        os.utime(path, (written_s, written_s), follow_symlinks=False)


def clean(root: Path, *words: str) -> Done:
    return slurm_health("clean", f"--journal={root}", *words, environ={"PATH": "/nonexistent"})


def left(root: Path) -> list[str]:
    return sorted(each.name for each in (root / "lab").iterdir())


@pytest.mark.parametrize(
    ("word", "kept"), [("--yes", "12_2 13 77 notes"), ("--dry-run", "12 12_1 12_2 13 77 notes")]
)
def test_old_journals_go_unless_only_listed(tmp_path: Path, word: str, kept: str) -> None:
    write(tmp_path, 12, 100, array="12_1")
    write(tmp_path, 13, 80, array="12_2")
    (tmp_path / "lab" / "notes").mkdir()  # what is no journal is left
    (tmp_path / "lab" / "77").write_text("a file")
    (tmp_path / "README").write_text("mine")

    done = clean(tmp_path, "--older-than=90d", word)

    assert done.code == 0, done
    *rows, total = done.stdout.splitlines()
    assert total.startswith("1 of 2 journals, ")
    assert len(rows) == (0 if word == "--yes" else 2)
    assert left(tmp_path) == kept.split()


def test_younger_journals_stay_if_slurm_cannot_be_asked(tmp_path: Path) -> None:
    write(tmp_path, 12, 100)
    write(tmp_path, 13, 40)

    done = clean(tmp_path, "--older-than=30d", "--yes")

    assert left(tmp_path) == ["13"]
    assert "squeue not found" in done.stderr
    assert "younger than 60 days: job 13" in done.stderr


def test_no_link_is_followed_out_of_a_journal(tmp_path: Path) -> None:
    root, precious = tmp_path / "journal", tmp_path / "precious"
    precious.mkdir()
    (precious / "weights").write_text("years of work")
    directory = write(root, 12, 100)
    (directory / "0" / "n9.jsonl").symlink_to(precious / "weights")
    (directory / "1").symlink_to(precious, target_is_directory=True)
    (root / "lab" / "99").symlink_to(precious, target_is_directory=True)
    age(directory, 100)

    clean(root, "--older-than=90d", "--yes")

    assert (precious / "weights").read_text() == "years of work"
    assert left(root) == ["99"]


@pytest.mark.root
def test_journals_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab").chmod(0o1777)
    write(tmp_path, 12, 100)
    given_to(NOBODY, write(tmp_path, 13, 100))

    clean(tmp_path, "--older-than=90d", "--yes")
    assert left(tmp_path) == ["13"]


@pytest.mark.root
def test_a_journal_that_was_written_or_given_away_since_it_was_chosen_stays(tmp_path: Path) -> None:
    run, _ = write_requeued_job(tmp_path, job=12)
    age(run.directory.parent, 100)
    given = write(tmp_path, 13, 100)
    chosen = {journal.job: journal for journal in own_journals(tmp_path)}
    run.clock = Clock(time.time())
    run.finish("proceed")
    os.chown(given, NOBODY, NOBODY)

    assert remove(tmp_path, chosen["12"]) == "it was written just now"
    assert remove(tmp_path, chosen["13"]) == f"it belongs to user {NOBODY} now"
    records = journals.read_all(run.directory, journals.MASTER)
    assert isinstance(records[-1].record, JobOutcome)


def test_what_an_interrupted_clean_has_left_goes_the_next_time(tmp_path: Path) -> None:
    write(tmp_path, 12, 100).rename(tmp_path / "lab" / ".removed-12")
    write(tmp_path, 13, 1)

    done = clean(tmp_path, "--older-than=90d", "--yes")

    assert done.stdout.startswith("nothing to remove: 1 journal,")
    assert left(tmp_path) == ["13"]


@pytest.mark.root
def test_a_journal_that_cannot_be_removed_does_not_keep_the_others(tmp_path: Path) -> None:
    held = write(tmp_path, 12, 100) / "0"
    write(tmp_path, 13, 100)
    subprocess.run(["mount", "--bind", held, held], check=True)
    try:
        done = clean(tmp_path, "--older-than=0h", "--yes")
    finally:
        for path in (tmp_path / "lab").rglob("0"):
            subprocess.run(["umount", path], check=False)

    assert done.code == 4
    assert "job 12 is left: it could not be removed" in done.stderr
    assert "13" not in left(tmp_path)


@pytest.mark.parametrize(("answer", "kept"), [(b"\n", ["12"]), (b"y\n", []), (b"", ["12"])])
def test_on_a_terminal_it_asks_first_and_can_be_interrupted(
    tmp_path: Path, answer: bytes, kept: list[str]
) -> None:
    write(tmp_path, 12, 100)
    words = ("clean", f"--journal={tmp_path}", "--older-than=90d")
    with terminal(*words, environ={"PATH": "/nonexistent"}) as asks:
        asks.read_until("Remove this journal? (--dry-run lists them) [y/N]")
        if answer:
            asks.type(answer)
        while not answer and asks.process.poll() is None:
            # A signal just before Python waits for input is seen when that returns.
            asks.interrupt()
            time.sleep(0.5)
        shown = asks.read_to_the_end(0 if answer else 130)
    assert ("slurm-health: interrupted" in shown) is (not answer)
    assert left(tmp_path) == kept
