# SPDX-License-Identifier: Apache-2.0

import itertools
import os
import time
from pathlib import Path

import pytest

from slurm_health.training.monitor.output_files import Tails, glob_of, patterns_in
from tests.support.rows import rows

ENVIRON = {
    "SLURM_JOB_ID": "12",
    "SLURM_ARRAY_JOB_ID": "10",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_JOB_NAME": "train",
}


@rows
def test_the_options_of_srun_are_found_in_a_script(line: str, patterns: list[str]) -> None:
    assert list(patterns_in(line)) == patterns


@rows
def test_a_pattern_of_srun_becomes_the_names_of_its_files(pattern: str, name: str) -> None:
    assert glob_of(pattern, ENVIRON) == name


SCRIPT = "srun --output=task-%t.log python train.py\n"


def follow(directory: Path, *own: Path, script: str = "") -> Tails:
    looks = itertools.count(0.0, 100.0)  # each finds new files
    return Tails(script, directory, {}, own, monotonic=lambda: next(looks))


def texts(tails: Tails) -> list[tuple[str, bool]]:
    return [(each.text, each.torn) for each in tails.written()]


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_what_is_written_is_read_once_and_what_was_there_before_never(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("of an earlier start\n")
    tails = follow(tmp_path, path)
    append(path, "step 1\nst")
    assert texts(tails) == [("step 1\nst", False)]
    append(path, "ep 2\n")
    assert texts(tails) == [("ep 2\n", False)]
    assert texts(tails) == []


def test_of_gigabytes_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.touch()
    tails = follow(tmp_path, path)
    with path.open("r+b") as file:
        file.truncate(5 << 30)  # sparse
        file.seek(0, os.SEEK_END)
        file.write(b"step 7\n")
    ((text, torn),) = texts(tails)

    assert torn
    assert len(text) <= 64 << 10
    assert text.endswith("step 7\n")


def test_a_file_that_was_cut_is_read_from_its_new_beginning(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("a long line\n")
    tails = follow(tmp_path, path)
    path.write_text("new\n")

    assert texts(tails) == [("new\n", False)]


def test_the_files_of_sruns_tasks_are_followed_when_they_come(tmp_path: Path) -> None:
    tails = follow(tmp_path, script=SCRIPT)
    assert texts(tails) == []
    for task in range(2):
        append(tmp_path / f"task-{task}.log", f"task {task}\n")
    (tmp_path / "notes.log").write_text("somebody else's\n")

    assert sorted(texts(tails)) == [("task 0\n", False), ("task 1\n", False)]


def test_a_file_server_whose_clock_is_minutes_behind_hides_no_output(tmp_path: Path) -> None:
    tails = follow(tmp_path, script=SCRIPT)
    append(tmp_path / "task-0.log", "step 1\n")
    behind_s = time.time() - 600.0
    os.utime(tmp_path / "task-0.log", (behind_s, behind_s))

    assert texts(tails) == [("step 1\n", False)]


@pytest.mark.parametrize("what", ["fifo", "directory", "nothing", "device"])
def test_what_is_no_file_is_passed_over(tmp_path: Path, what: str) -> None:
    path = tmp_path / "out"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what == "device":
        path = Path("/dev/null")

    assert texts(follow(tmp_path, path)) == []
