# SPDX-License-Identifier: Apache-2.0
"""The index is a cache: whatever becomes of it, the journals are the truth."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slurm_health.fleet import answers
from slurm_health.fleet.index import index_path, opened
from slurm_health.fleet.reading import (
    MOST_RUNS,
    NEVER_S,
    JobReading,
    JournalReader,
    KnownJob,
    read_job,
)
from slurm_health.records.errors import IndexUnusable
from slurm_health.records.standings import Reliability
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from tests.report.stories import of_records
from tests.support.command_line import finish, slurm_health, start
from tests.support.journals import Clock, RunJournal, write_healthy_run, write_requeued_job
from tests.support.rows import rows

NOW_S = 1_700_100_000.0


def indexed(
    root: Path, index: Path, *, now_s: float = NOW_S, lock_timeout_s: float = 10.0
) -> set[str]:
    """Bring the index up to date; the nodes that it then knows."""
    with opened(index, root, now_s=now_s, lock_timeout_s=lock_timeout_s) as found:
        return set(found.nodes())


def history_of(root: Path, index: Path | None, nodes: str) -> list[answers.NodeHistory]:
    with opened(index, root, now_s=NOW_S) as found:
        return answers.histories(found, nodes, now_s=NOW_S, known={})


def checks_of(root: Path, index: Path | None, node: str) -> list[tuple[str, str]]:
    (history,) = history_of(root, index, node)
    return [(check.job, check.label) for check in history.checks]


def troubles_of(root: Path, index: Path) -> dict[str, int]:
    with opened(index, root, now_s=NOW_S) as found:
        return found.troubles()


def test_checks_of_all_jobs_are_there_with_their_figures(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    write_requeued_job(root, job=12)
    write_healthy_run(root, job=13, nodes=("n1", "n3"), clock=Clock(1_700_050_000.0))

    (history,) = history_of(root, tmp_path / "index", "n3")

    assert [(check.job, check.level) for check in history.checks] == [
        ("12", Level.FAULTY),
        ("13", Level.HEALTHY),
    ]
    assert [str(signal) for signal in history.checks[0].signals] == ["faulty", "left out"]
    assert history.standing.level is Reliability.SUSPECT
    (other,) = history_of(root, tmp_path / "index", "n1")
    assert [check.job + check.label for check in other.checks] == ["120", "121", "130"]
    assert other.standing.jobs == 2
    assert {series.metric for series in history.figures} == {"allgather GB/s", "matmul GFLOP/s"}


def test_the_history_of_many_nodes_is_that_of_each(tmp_path: Path) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    write_requeued_job(root, job=12)
    write_healthy_run(root, job=13, nodes=("n1", "n7"), clock=Clock(1_600_000_000.0))  # long ago

    many = history_of(root, index, "n[1,3,7]")

    assert [history.node for history in many] == ["n1", "n3", "n7"]
    assert many == [history_of(root, index, node)[0] for node in ("n1", "n3", "n7")]
    assert many[2].standing.jobs == 0


def test_a_job_that_went_on_is_read_again_a_gone_one_forgotten(tmp_path: Path) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    run = RunJournal(root, job=12, nodes=("n1", "n2"))
    run.start()
    assert indexed(root, index) == {"n1", "n2"}

    run.judge(NodeVerdict(node="n2", level=Level.FAULTY, reason="why", evidence=("x",)))
    (history,) = history_of(root, index, "n2")
    assert history.checks[0].level is Level.FAULTY

    write_healthy_run(root, job=13, nodes=("n3", "n4"))
    shutil.rmtree(root / "lab" / "12")
    assert indexed(root, index) == {"n3", "n4"}


@pytest.mark.parametrize("harm", ["truncated", "garbled", "outdated", "without a table", "forged"])
def test_an_index_that_is_harmed_is_made_anew(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    root, index = tmp_path / "journal", tmp_path / "index"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    indexed(root, index)
    data = index.read_bytes()
    statements = {
        "outdated": "PRAGMA user_version = 0",
        "without a table": "DROP TABLE slurm_health_checks",
        "forged": "UPDATE slurm_health_jobs SET final_s = 0",
    }

    if harm == "truncated":
        index.write_bytes(data[: len(data) // 2])
    elif harm == "garbled":
        index.write_bytes(os.urandom(12288) + data[12288:])
    else:
        with sqlite3.connect(index) as found:
            found.execute(statements[harm])
    if harm == "forged":  # a rollback
        Path(f"{index}-journal").write_bytes(os.urandom(2000))

    assert indexed(root, index) == {"n1", "n2"}
    assert harm != "outdated" or "anew" not in caplog.text  # after an upgrade nothing is wrong
    assert checks_of(root, index, "n1") == [("12", "0")]


def test_a_damaged_row_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    indexed(root, index)
    with sqlite3.connect(index) as found:
        found.execute("UPDATE slurm_health_checks SET data = x'00'")
    found.close()

    with pytest.raises(IndexUnusable, match=r"is damaged: .*; remove it: it is made anew"):
        checks_of(root, index, "n1")


@pytest.mark.heavy
def test_an_index_that_a_reader_keeps_locked_answers_with_what_it_has_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    assert indexed(root, index) == {"n1", "n2"}
    write_healthy_run(root, job=13, nodes=("n3",), clock=Clock(1_700_050_000.0))

    with contextlib.closing(sqlite3.connect(f"{index.as_uri()}?mode=ro", uri=True)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM slurm_health_jobs").fetchone()
        assert indexed(root, index, lock_timeout_s=0.1) == {"n1", "n2"}

    assert "the answer may lack the latest jobs" in caplog.text
    assert indexed(root, index) == {"n1", "n2", "n3"}


def test_without_a_home_that_can_be_written_the_history_is_read_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").write_text("a file")
    write_healthy_run(tmp_path / "journal", job=12, nodes=("n1", "n2"))

    path = index_path(tmp_path / "journal", {"XDG_CACHE_HOME": str(tmp_path / "home")})

    assert path is None
    assert "the index is not kept" in caplog.text
    with opened(path, tmp_path / "journal", now_s=NOW_S) as found:
        assert found.nodes() == ["n1", "n2"]


def test_a_journal_that_cannot_be_read_is_counted_and_the_others_are_there(tmp_path: Path) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    odd = write_healthy_run(root, job=13, nodes=("n3", "n4"))
    (odd.directory / "n3.jsonl").write_text('{"v":99,"id":"n3:0","time_s":1,"kind":"new"}\n')
    (root / "lab" / "14").symlink_to("12")
    (root / "lab" / "15").mkdir(mode=0o777)
    (root / "lab" / "15").chmod(0o777)
    (root / "lab" / "15" / "0").mkdir()
    # Anybody may make a directory in a root that users share, and no text is in `\xff`.
    (root / os.fsdecode(b"\xff") / "13" / "0").mkdir(parents=True)

    assert indexed(root, index) == {"n1", "n2"}
    reasons = " ".join(troubles_of(root, index))
    assert "holds records of version 99" in reasons
    assert "others can write" in reasons


@pytest.mark.parametrize("part", ["", "n1.jsonl"])
def test_a_job_that_could_not_be_read_is_read_later(tmp_path: Path, part: str) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    run = write_healthy_run(root, job=12, nodes=("n1", "n2"))
    hindered = run.directory / part
    mode = hindered.stat().st_mode
    hindered.chmod(0o666)  # others can write, so it is refused
    assert indexed(root, index) == set()

    hindered.chmod(mode)
    assert indexed(root, index) == {"n1", "n2"}
    assert troubles_of(root, index) == {}

    run.finish("proceed")
    hindered.chmod(0o666)
    assert indexed(root, index) == {"n1", "n2"}
    assert list(troubles_of(root, index).values()) == [1]


def test_two_processes_index_the_same_journals_at_once(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    for job in range(40):
        write_healthy_run(root, job=100 + job, nodes=("n1", "n2"))
    words = ("history", "n1", "--json", f"--journal={root}")

    processes = [start(*words, environ={"XDG_CACHE_HOME": str(tmp_path)}) for _ in range(3)]
    ends = [finish(process) for process in processes]

    assert [end.code for end in ends] == [0, 0, 0], ends
    counts = [len(json.loads(end.stdout)["nodes"][0]["checks"]) for end in ends]
    assert counts == [40, 40, 40]


@pytest.mark.heavy
def test_an_interrupted_command_keeps_what_it_has_and_prints_no_traceback(tmp_path: Path) -> None:
    root, environ = tmp_path / "journal", {"XDG_CACHE_HOME": str(tmp_path)}
    for job in range(300):
        write_healthy_run(root, job=100 + job, nodes=("n1", "n2"))
    process = start("lemons", f"--journal={root}", environ=environ)
    while process.poll() is None and not list(tmp_path.glob("slurm-health/*.sqlite")):
        pass
    process.send_signal(signal.SIGINT)
    ended = finish(process)

    assert ended.code in {130, 0}, ended
    assert "Traceback" not in ended.stderr
    done = slurm_health("history", "n1", "--json", f"--journal={root}", environ=environ)
    assert len(json.loads(done.stdout)["nodes"][0]["checks"]) == 300


# --- journals of other users ----------------------------------------------------------------------


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
def test_root_opens_no_file_of_another_user(public_path: Path) -> None:
    for job in (12, 13, 14, 15):
        write_healthy_run(public_path, job=job, nodes=("n1", "n2"))
    lab = public_path / "lab"
    lab.chmod(0o1777)
    for name in ("12", "14", "15"):
        give(lab / name)
    (lab / "14" / "0" / "n1.jsonl").chmod(0o000)
    os.truncate(journal.path_of(lab / "15" / "0", "n1"), 1 << 40)

    with opened_here() as names:
        jobs = {job for job, _ in checks_of(public_path, public_path / "index", "n1")}
    usual, closed, large = read(public_path, THEIRS, "12", "14", "15")

    assert jobs == {"12", "13"}
    assert ("13" in names, "12" in names) == (True, False)
    assert isinstance(usual, JobReading)
    assert isinstance(closed, JobReading)
    assert isinstance(large, JobReading)
    assert (usual.trouble, len(usual.checks)) == ("", 1)
    assert "Permission denied" in closed.trouble
    assert "n1.jsonl has 1099511627776 bytes" in large.trouble
    assert large.final_s == NEVER_S  # it is looked at until it can be read


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
def test_an_owner_who_kills_the_reader_hides_only_their_own_jobs(public_path: Path) -> None:
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


# --- when a job's journal is final ----------------------------------------------------------------


BEGAN_S = 1_700_000_000.0
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def written_at(root: Path, job: int, time_s: float) -> None:
    """Let all of a job's files be written last at this time."""
    for path in (root / "lab" / str(job)).rglob("*.jsonl"):
        os.utime(path, (time_s, time_s))


@rows
def test_a_job_that_may_come_back_is_looked_at_again_days_later(
    tmp_path: Path, written: list[dict[str, Any]]
) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    nodes = ["n1", "n2"]
    of_records(root, begins="checked", nodes=nodes, written=written, later_s=0.0)
    written_at(root, 12, BEGAN_S)
    for days in (0.1, 2):
        assert indexed(root, index, now_s=BEGAN_S + days * DAY_S) == {"n1", "n2"}

    write_healthy_run(root, job=12, label="1", nodes=("n1", "n3"), clock=Clock(BEGAN_S))

    assert indexed(root, index, now_s=BEGAN_S + 3 * DAY_S) == {"n1", "n2", "n3"}


def test_what_followed_the_last_look_is_found_however_late_the_next_one_is(tmp_path: Path) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    written_at(root, 12, BEGAN_S)
    assert indexed(root, index, now_s=BEGAN_S + HOUR_S) == {"n1", "n2"}

    write_healthy_run(root, job=12, label="1", nodes=("n1", "n3"), clock=Clock(BEGAN_S))
    written_at(root, 12, BEGAN_S + 5 * HOUR_S)

    assert indexed(root, index, now_s=BEGAN_S + 30 * DAY_S) == {"n1", "n2", "n3"}


def test_a_job_is_read_again_once_its_first_check_is_there(tmp_path: Path) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    made = root / "lab" / "12"
    made.mkdir(mode=0o700, parents=True)
    assert indexed(root, index, now_s=made.stat().st_mtime) == set()

    write_healthy_run(root, job=12, nodes=("n1", "n2"))

    assert indexed(root, index, now_s=made.stat().st_mtime + HOUR_S) == {"n1", "n2"}


@pytest.mark.parametrize("looks_s", [(HOUR_S, 30 * DAY_S), (30 * DAY_S,)])
def test_a_final_job_is_not_read_again(tmp_path: Path, looks_s: tuple[float, ...]) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    written_at(root, 12, BEGAN_S)
    for look_s in looks_s:
        indexed(root, index, now_s=BEGAN_S + look_s)

    with opened_here() as names:
        assert indexed(root, index, now_s=BEGAN_S + 31 * DAY_S) == {"n1", "n2"}
    assert "12" not in names

    with closing(sqlite3.connect(index)) as found:
        assert found.execute("SELECT final_s FROM slurm_health_jobs").fetchall() == [(0.0,)]
