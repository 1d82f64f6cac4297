# SPDX-License-Identifier: Apache-2.0
"""`slurm-health clean` as it is called. No Slurm answers here; the lab has one that does."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path

import pytest

from slurm_health.fleet.clean import journals as own_journals
from slurm_health.fleet.clean import remove
from slurm_health.records.records import JobOutcome
from slurm_health.system import journal as journals
from tests.support.command_line import COMMAND, Done, slurm_health
from tests.support.journals import Clock, write_healthy_run, write_requeued_job
from tests.support.stranger import given_to

DAY_S = 86400.0
NOBODY = 65534
CTRL_C = b"\x03"
PRESSED_AGAIN_S = 2.0


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


@pytest.mark.parametrize(("word", "kept"), [("--yes", ["13"]), ("--dry-run", ["12", "13"])])
def test_what_is_older_goes_unless_it_is_only_to_be_listed(
    tmp_path: Path, word: str, kept: list[str]
) -> None:
    write(tmp_path, 12, 100)
    write(tmp_path, 13, 80)

    done = clean(tmp_path, "--older-than=90d", word)

    assert done.code == 0, done
    *rows, total = done.stdout.splitlines()
    assert total.startswith("1 of 2 journals, ")
    assert [row.split()[0] for row in rows] == ([] if word == "--yes" else ["JOB", "12"])
    assert left(tmp_path) == kept


def test_where_slurm_cannot_be_asked_that_is_said_and_younger_journals_stay(
    tmp_path: Path,
) -> None:
    write(tmp_path, 12, 100)
    write(tmp_path, 13, 40)

    done = clean(tmp_path, "--older-than=30d", "--yes")

    assert left(tmp_path) == ["13"]
    assert "squeue not found" in done.stderr
    assert "younger than 60 days: job 13" in done.stderr


def test_the_name_of_an_array_task_goes_with_its_journal(tmp_path: Path) -> None:
    for job, task, days in ((13, 1, 100), (14, 2, 10)):
        write(tmp_path, job, days, array=f"12_{task}")

    clean(tmp_path, "--older-than=90d", "--yes")

    assert left(tmp_path) == ["12_2", "14"]


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


def test_what_is_no_journal_is_left(tmp_path: Path) -> None:
    write(tmp_path, 12, 100)
    (tmp_path / "lab" / "notes").mkdir()
    (tmp_path / "lab" / "77").write_text("a file")
    (tmp_path / "README").write_text("mine")

    clean(tmp_path, "--older-than=0h", "--yes")

    assert left(tmp_path) == ["77", "notes"]


@pytest.mark.root
def test_journals_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab").chmod(0o1777)
    write(tmp_path, 12, 100)
    given_to(NOBODY, write(tmp_path, 13, 100))

    clean(tmp_path, "--older-than=90d", "--yes")
    assert left(tmp_path) == ["13"]


def test_a_journal_that_was_written_since_it_was_chosen_stays(tmp_path: Path) -> None:
    run, _ = write_requeued_job(tmp_path, job=12)
    age(run.directory.parent, 100)
    (chosen,) = own_journals(tmp_path)
    run.clock = Clock(time.time())
    run.finish("proceed")

    assert remove(tmp_path, chosen) == "it was written just now"

    records = journals.read_all(run.directory, journals.MASTER)
    assert isinstance(records[-1].record, JobOutcome)


@pytest.mark.root
def test_a_journal_that_became_anothers_stays(tmp_path: Path) -> None:
    directory = write(tmp_path, 12, 100)
    (chosen,) = own_journals(tmp_path)
    os.chown(directory, NOBODY, NOBODY)

    assert remove(tmp_path, chosen) == f"it belongs to user {NOBODY} now"


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


@pytest.mark.parametrize(("answer", "kept"), [(b"n\n", ["12"]), (b"\n", ["12"]), (b"y\n", [])])
def test_on_a_terminal_it_asks_first(tmp_path: Path, answer: bytes, kept: list[str]) -> None:
    write(tmp_path, 12, 100)
    code, asked = on_a_terminal(tmp_path, answer)
    assert (code, "Remove this journal? (--dry-run lists them) [y/N]" in asked) == (0, True), asked
    assert left(tmp_path) == kept


def test_who_interrupts_the_question_keeps_everything(tmp_path: Path) -> None:
    write(tmp_path, 12, 100)
    code, shown = on_a_terminal(tmp_path, CTRL_C)
    assert (code, "slurm-health: interrupted" in shown) == (130, True), shown
    assert left(tmp_path) == ["12"]


def on_a_terminal(root: Path, answer: bytes) -> tuple[int, str]:
    """Call `clean` on a terminal of its own, answer its question; its exit code, and the words."""
    pid, terminal = pty.fork()
    if pid == 0:
        words = [*COMMAND, "clean", f"--journal={root}", "--older-than=90d"]
        os.execvpe(words[0], words, {**os.environ, "PATH": "/nonexistent"})
    shown, typed = b"", False
    try:
        while True:
            # A Ctrl-C just before Python waits for input is seen when that returns: pressed again.
            again = typed and not select.select([terminal], [], [], PRESSED_AGAIN_S)[0]
            if not again:
                shown += os.read(terminal, 4096)
            if (again and answer == CTRL_C) or (not typed and b"[y/N]" in shown):
                typed = bool(os.write(terminal, answer))
    except OSError:
        pass  # so a terminal tells that its other end is closed
    os.close(terminal)
    assert typed, shown
    assert b"Traceback" not in shown, shown
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()
