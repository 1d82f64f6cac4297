# SPDX-License-Identifier: Apache-2.0

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_health.fleet.clean import journals, remove
from slurm_health.fleet.index import opened
from slurm_health.records.records import (
    Disposition,
    JobOutcome,
    Record,
    VerdictReached,
)
from slurm_health.report.find import runs_of_job
from slurm_health.system import journal
from tests.support.journals import Clock, run_started, write_healthy_run
from tests.support.rows import rows
from tests.support.stranger import given_to

STARTED = run_started(["n1", "n2"], run_id="now", start_time_s=1000)


def write(root: Path, label: str, *records: Record) -> Path:
    directory = journal.job_directory(root, "lab", 12) / label
    journal.create(directory, [journal.MASTER])
    journal.Writer(directory, journal.MASTER, Clock()).append(*records)
    return directory


@rows
def test_a_check_takes_over_what_was_cut_short_and_else_has_a_directory_of_its_own(
    tmp_path: Path,
    there: dict[str, list[str]],
    older: dict[str, Any],
    asked: dict[str, Any],
    name: str,
    takes_over: str,
) -> None:
    before = msgspec.structs.replace(STARTED, run_id="before", **older)
    records: dict[str, Record] = {
        "before": before,
        "ours": STARTED,
        "judged": VerdictReached(nodes=[]),
        **{
            word: JobOutcome(disposition=Disposition(word), exit_code=1)
            for word in ("proceed", "stop", "requeue")
        },
    }
    for label, words in there.items():
        write(tmp_path, label, *(records[word] for word in words))
    wanted = msgspec.structs.replace(STARTED, **asked)
    expected = records[takes_over] if takes_over else wanted

    found = journal.directory_of_check(tmp_path, wanted)

    assert found == (tmp_path / "lab" / "12" / name, expected)


def test_a_check_that_failed_is_the_last_of_its_name(tmp_path: Path) -> None:
    assert journal.directory_of_failed_check(tmp_path, STARTED)[0].name == "0"
    write(tmp_path, "0", STARTED)
    write(tmp_path, "0-2", STARTED)
    write(tmp_path, "0-3", msgspec.structs.replace(STARTED, run_id="before"))

    directory, started = journal.directory_of_failed_check(tmp_path, STARTED)

    assert (directory.name, started) == ("0-2", STARTED)


def test_an_array_task_is_found_under_the_id_its_user_knows(tmp_path: Path) -> None:
    started = msgspec.structs.replace(STARTED, array="11_3")
    directory = write(tmp_path, "0", started)

    journal.link_array_task(tmp_path, started)
    journal.link_array_task(tmp_path, started)

    assert (tmp_path / "lab" / "11_3" / "0").samefile(directory)


def test_an_array_task_whose_name_is_taken_has_a_log_line_and_its_check(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lab" / "11_3" / "0").mkdir(parents=True)

    journal.link_array_task(tmp_path, msgspec.structs.replace(STARTED, array="11_3"))

    assert f"11_3 cannot be made (Is a directory): report {STARTED.job_id} finds it" in caplog.text
    assert [each.name for each in (tmp_path / "lab").iterdir()] == ["11_3"]


NOBODY = 65534
BESIDE = f"{STARTED.job_id}.{'0' * 15}"


def taken(root: Path) -> Path:
    """Have another user take the name of the job in a directory that users share."""
    (root / "lab").mkdir()
    (root / "lab").chmod(0o1777)
    occupied = root / "lab" / str(STARTED.job_id)
    (occupied / "0").mkdir(parents=True)
    given_to(NOBODY, occupied)
    return occupied


@pytest.mark.root
def test_a_job_whose_name_another_user_has_taken_is_checked_beside_it(tmp_path: Path) -> None:
    occupied = taken(tmp_path)
    for name in (f"{BESIDE}a", f"{BESIDE}b"):  # nor is what others lay there with such a name
        (tmp_path / "lab" / name).mkdir(mode=0o700)
        os.chown(tmp_path / "lab" / name, NOBODY, NOBODY)

    directory, started = journal.directory_of_check(tmp_path, STARTED)
    journal.create(directory, [journal.MASTER])

    assert started == STARTED
    assert journal.job_of(directory.parent.name) == str(STARTED.job_id)
    assert directory.parent.name not in {occupied.name, f"{BESIDE}a", f"{BESIDE}b"}
    assert directory.parent.stat().st_uid == os.geteuid()
    assert journal.directory_of_check(tmp_path, STARTED)[0] == directory
    # So the epilog finds it.
    own = journal.name_of(tmp_path, "lab", str(STARTED.job_id), os.geteuid(), quick=True)
    assert own == directory.parent.name


@pytest.mark.parametrize("what", ["another name of a file of mine", "a directory others can write"])
def test_what_another_can_lay_there_that_is_mine_costs_no_check(tmp_path: Path, what: str) -> None:
    # Whoever may write a file may give it a second name (protected_hardlinks), and whoever may
    # write a directory and the one it is in may move it: the owner stays.
    (tmp_path / "lab").mkdir()
    for name in (str(STARTED.job_id), f"{BESIDE}0"):
        laid = tmp_path / "lab" / name
        if what.endswith("write"):
            laid.mkdir()
            laid.chmod(0o777)
        else:
            (tmp_path / "mine").touch()
            laid.hardlink_to(tmp_path / "mine")

    directory, _ = journal.directory_of_check(tmp_path, STARTED)
    journal.create(directory, [journal.MASTER])

    assert directory.parent.name not in {str(STARTED.job_id), f"{BESIDE}0"}
    assert journal.directory_of_check(tmp_path, STARTED)[0] == directory


def test_who_lays_something_there_in_the_last_moment_costs_no_check(tmp_path: Path) -> None:
    with laid_before_it_is_made(tmp_path / "lab" / "12"):
        directory, _ = journal.directory_of_check(tmp_path, STARTED)
        journal.create(directory, [journal.MASTER])

    assert directory.parent.name.startswith("12.")


@contextlib.contextmanager
def laid_before_it_is_made(path: Path) -> Iterator[None]:
    """Have another lay a directory, as soon as somebody is about to make it."""
    active = True

    def lay(event: str, args: tuple[object, ...]) -> None:
        nonlocal active
        if active and event == "os.mkdir" and str(args[0]) in {path.name, str(path)}:
            active = False
            path.mkdir()
            path.chmod(0o777)  # it might be another user's just as well

    sys.addaudithook(lay)  # for good
    yield
    assert not active


_COMES_AND_GOES = """
import os, sys
os.umask(0)
names = [os.path.join(sys.argv[1], f"12.{number:016x}") for number in range(40)]
print("begun", flush=True)
while True:
    for name in names:
        os.mkdir(name, 0o777)
    for name in names:
        os.rmdir(name)
"""


def test_what_comes_and_goes_beside_a_taken_name_hides_no_journal(tmp_path: Path) -> None:
    (tmp_path / "lab" / "12").mkdir(parents=True)
    (tmp_path / "lab" / "12").chmod(0o777)
    own = journal.name_of(tmp_path, "lab", "12", os.geteuid(), make=True)
    argv = [sys.executable, "-c", _COMES_AND_GOES, str(tmp_path / "lab")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            names = {journal.name_of(tmp_path, "lab", "12", os.geteuid()) for _ in range(500)}
            for _ in range(500):
                assert journal.owners_of(tmp_path, "lab", "12") == {os.geteuid()}
        finally:
            other.kill()

    assert names == {own}


@pytest.mark.root
@pytest.mark.parametrize("leaves", [False, True])
def test_what_stands_beside_a_taken_name_is_found(tmp_path: Path, leaves: bool) -> None:
    occupied = taken(tmp_path)
    job = journal.directory_of_check(tmp_path, STARTED)[0].parent
    run = write_healthy_run(tmp_path / "x", job=STARTED.job_id, nodes=("n1", "n2"))
    run.directory.rename(job / "0")
    shutil.rmtree(tmp_path / "x")
    if leaves:
        shutil.rmtree(occupied)

    assert runs_of_job(tmp_path, str(STARTED.job_id)) == [job / "0"]
    with opened(None, tmp_path, now_s=time.time()) as found:
        assert set(found.nodes()) == {"n1", "n2"}
    there = {each.job: each for each in journals(tmp_path)}
    assert set(there) == {job.name}
    assert remove(tmp_path, there[job.name]) == ""
    assert not job.exists()


# --- whose directories are, and what is no user's journal -----------------------------------------


# In a mount namespace of its own, so that nothing stays mounted.
MOUNTED = """\
mount -t tmpfs -o uid=0 none "$1/7" && exec "$2" -c '
import json, sys
from pathlib import Path
from slurm_health.system import journal
found = journal.statuses([Path(sys.argv[1], name) for name in ("7", "8")])
print(json.dumps([each.trouble for each in found]))' "$1"
"""


def test_directories_links_and_what_is_gone_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "12").mkdir()
    (tmp_path / "9_1").symlink_to("12")
    (tmp_path / "file").touch()
    many = [str(number) for number in range(100, 2500)]  # more than one child looks at
    names = ["12", "9_1", "file", "13", "x" * 300, *many, "12"]
    directory, link, file, gone, odd, *absent, again = journal.statuses(
        [tmp_path / name for name in names]
    )
    assert directory
    assert link
    assert file
    assert (directory.is_directory, link.is_directory, file.is_directory) == (True, False, False)
    assert (directory.uid, directory.trouble) == (os.getuid(), "")
    assert directory.changed_s == (tmp_path / "12").stat().st_mtime
    assert (directory.target, link.target) == ("", "12")
    assert gone is None
    assert odd
    assert odd.trouble == "File name too long"
    assert set(absent) == {None}
    assert again == directory


@pytest.mark.root
def test_what_is_mounted_over_a_directory_is_reported(tmp_path: Path) -> None:
    for name in ("7", "8"):
        (tmp_path / name).mkdir()
    argv = ["unshare", "--mount", "sh", "-c", MOUNTED, "sh", str(tmp_path), sys.executable]
    root = Path(__file__).parents[3]
    ran = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False)
    if "Operation not permitted" in ran.stderr or "mount: " in ran.stderr:
        pytest.skip(f"cannot mount here: {ran.stderr.splitlines()[-1]}")
    assert json.loads(ran.stdout) == ["a filesystem is mounted there", ""], ran.stderr
