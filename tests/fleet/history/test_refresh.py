# SPDX-License-Identifier: Apache-2.0
"""The index is a cache: whatever becomes of it, the journals are the truth."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_health.fleet.history import answer, place, refresh
from slurm_health.records.errors import IndexUnusable
from slurm_health.records.standings import Reliability
from slurm_health.records.verdict import Level, NodeVerdict
from tests.support.command_line import finish, slurm_health, start
from tests.support.journals import Clock, RunJournal, write_healthy_run, write_requeued_job

NOW_S = 1_700_100_000.0


def indexed(
    root: Path,
    index: Path,
    *,
    now_s: float = NOW_S,
    rebuild: bool = False,
    lock_timeout_s: float = 10.0,
) -> set[str]:
    """Bring the index up to date; the nodes that it then knows."""
    where = replace(place.choose(str(index), {}, root), lock_timeout_s=lock_timeout_s)
    with refresh.opened(where, root, now_s=now_s, rebuild=rebuild) as found:
        return set(found.nodes())


def checks_of(root: Path, index: Path, node: str) -> list[tuple[str, str]]:
    where = place.choose(str(index), {}, root)
    with refresh.opened(where, root, now_s=NOW_S) as found:
        (history,) = answer.histories(found, node, cluster=None, now_s=NOW_S)
    return [(each.job, each.label) for each in history.checks]


@pytest.mark.heavy
def test_an_index_that_a_reader_keeps_locked_is_answered_from_with_the_latest_jobs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    assert indexed(root, index) == {"n1", "n2"}
    write_healthy_run(root, job=13, nodes=("n3",), clock=Clock(1_700_050_000.0))

    with contextlib.closing(sqlite3.connect(f"{index.as_uri()}?mode=ro", uri=True)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM slurm_health_jobs").fetchone()
        assert indexed(root, index, lock_timeout_s=0.1) == {"n1", "n2", "n3"}

    assert f"another process holds the index {index}" in caplog.text
    assert reader_sees(index) == 1
    assert indexed(root, index) == {"n1", "n2", "n3"}
    assert reader_sees(index) == 2


def reader_sees(index: Path) -> int:
    """How many jobs the file itself holds."""
    with contextlib.closing(sqlite3.connect(index)) as reader:
        return int(reader.execute("SELECT COUNT(*) FROM slurm_health_jobs").fetchone()[0])


def test_checks_of_all_jobs_are_there_with_their_figures(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    write_requeued_job(root, job=12)
    write_healthy_run(root, job=13, nodes=("n1", "n3"), clock=Clock(1_700_050_000.0))

    where = place.choose(str(tmp_path / "index"), {}, root)
    with refresh.opened(where, root, now_s=NOW_S) as found:
        (history,) = answer.histories(found, "n3", cluster=None, now_s=NOW_S)

    assert [(each.job, each.said.level) for each in history.checks] == [
        ("12", Level.FAULTY),
        ("13", Level.HEALTHY),
    ]
    assert [str(each) for each in history.checks[0].said.signals] == ["faulty", "left out"]
    assert history.standing.level is Reliability.SUSPECT
    assert {each.metric for each in history.series} == {"allgather GB/s", "matmul GFLOP/s"}


def test_the_history_of_many_nodes_is_that_of_each(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    write_requeued_job(root, job=12)
    write_healthy_run(root, job=13, nodes=("n1", "n7"), clock=Clock(1_600_000_000.0))  # long ago
    names = ["n1", "n3", "n7"]

    where = place.choose(str(tmp_path / "index"), {}, root)
    with refresh.opened(where, root, now_s=NOW_S) as index:
        many = answer.histories(index, "n[1,3,7]", cluster=None, now_s=NOW_S)
        each = [answer.histories(index, name, cluster=None, now_s=NOW_S)[0] for name in names]

    assert [found.node for found in many] == names
    assert many == each
    assert many[2].standing.jobs == 0


def test_two_attempts_of_a_job_are_two_checks_and_one_job(tmp_path: Path) -> None:
    write_requeued_job(tmp_path / "journal", job=12)

    assert checks_of(tmp_path / "journal", tmp_path / "i", "n1") == [("12", "0"), ("12", "1")]
    where = place.choose(str(tmp_path / "i"), {}, tmp_path / "journal")
    with refresh.opened(where, tmp_path / "journal", now_s=NOW_S) as found:
        jobs = {each.node: each.jobs for each in found.records("lab", since_s=0.0)}
    assert jobs["n1"] == 1


def test_a_job_that_went_on_is_read_again(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    run = RunJournal(root, job=12, nodes=("n1", "n2"))
    run.start()
    assert indexed(root, tmp_path / "index") == {"n1", "n2"}

    run.judge(NodeVerdict(node="n2", level=Level.FAULTY, reason="why", evidence=("x",)))

    where = place.choose(str(tmp_path / "index"), {}, root)
    with refresh.opened(where, root, now_s=NOW_S) as found:
        (seen,) = found.of_node("lab", "n2", since_s=0.0)
    assert seen.said.level is Level.FAULTY


def test_a_job_whose_journal_is_gone_is_forgotten(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    write_healthy_run(root, job=13, nodes=("n3", "n4"))
    indexed(root, tmp_path / "index")

    shutil.rmtree(root / "lab" / "12")

    assert indexed(root, tmp_path / "index") == {"n3", "n4"}


def damage_nothing(_: Path) -> None:
    pass


def truncate(index: Path) -> None:
    os.truncate(index, index.stat().st_size // 2)


def garble(index: Path) -> None:
    data = bytearray(index.read_bytes())
    data[4096:12288] = os.urandom(8192)
    index.write_bytes(data)


def outdate(index: Path) -> None:
    with sqlite3.connect(index) as found:
        found.execute("PRAGMA user_version = 0")


def drop(index: Path) -> None:
    with sqlite3.connect(index) as found:
        found.execute("DROP TABLE slurm_health_seen")


def spoil(index: Path) -> None:
    with sqlite3.connect(index) as found:
        found.execute("UPDATE slurm_health_jobs SET final_s = 0")
    (Path(f"{index}-journal")).write_bytes(os.urandom(2000))


@pytest.mark.parametrize("harm", [damage_nothing, truncate, garble, outdate, drop, spoil])
def test_an_index_that_is_harmed_is_made_anew(tmp_path: Path, harm: object) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    indexed(root, index)

    assert callable(harm)
    harm(index)

    assert indexed(root, index) == {"n1", "n2"}
    assert checks_of(root, index, "n1") == [("12", "0")]


def test_data_that_nobody_wrote_so_is_found_when_it_is_read_and_rebuilding_helps(
    tmp_path: Path,
) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    indexed(root, index)
    with sqlite3.connect(index) as found:
        found.execute("UPDATE slurm_health_seen SET data = x'00'")
    found.close()

    with pytest.raises(IndexUnusable, match="is damaged"):
        checks_of(root, index, "n1")

    indexed(root, index, rebuild=True)
    assert checks_of(root, index, "n1") == [("12", "0")]


@pytest.mark.parametrize("text", ["import torch\n", "SQLite format 3\0" + 200 * "x"])
def test_a_file_that_was_named_by_mistake_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    precious = tmp_path / "train.py"
    precious.write_text(text)

    with pytest.raises(IndexUnusable, match="--index FILE"):
        indexed(tmp_path / "journal", precious)
    with pytest.raises(IndexUnusable, match="--index FILE"):
        indexed(tmp_path / "journal", precious, rebuild=True)

    assert precious.read_text() == text


def test_a_database_of_another_program_is_left_as_it_is(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as found:
        found.execute("CREATE TABLE seen (x)")
    found.close()
    before = other.read_bytes()

    with pytest.raises(IndexUnusable, match="another program"):
        indexed(tmp_path / "journal", other, rebuild=True)

    assert other.read_bytes() == before


def test_an_index_where_others_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)

    with pytest.raises(IndexUnusable, match="others than you and root can write"):
        place.choose(str(shared / "index"), {}, tmp_path)


def test_without_a_home_that_can_be_written_the_history_is_read_each_time(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    write_healthy_run(tmp_path / "journal", job=12, nodes=("n1", "n2"))

    where = place.choose(None, {"XDG_CACHE_HOME": str(tmp_path / "home")}, tmp_path / "journal")

    assert where.path is None
    with refresh.opened(where, tmp_path / "journal", now_s=NOW_S) as found:
        assert found.nodes() == ["n1", "n2"]


def test_a_journal_that_cannot_be_read_is_counted_and_the_others_are_there(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    write_healthy_run(root, job=12, nodes=("n1", "n2"))
    odd = write_healthy_run(root, job=13, nodes=("n3", "n4"))
    (odd.directory / "n3.jsonl").write_text('{"v":99,"id":"n3:0","time_s":1,"kind":"new"}\n')
    (root / "lab" / "14").symlink_to("12")
    (root / "lab" / "15").mkdir(mode=0o777)
    (root / "lab" / "15").chmod(0o777)
    (root / "lab" / "15" / "0").mkdir()

    where = place.choose(str(tmp_path / "index"), {}, root)
    with refresh.opened(where, root, now_s=NOW_S) as found:
        assert found.nodes() == ["n1", "n2"]
        reasons = " ".join(found.troubles())

    assert "holds records of version 99" in reasons
    assert "others can write" in reasons


@pytest.mark.parametrize("part", ["", "n1.jsonl"])
def test_a_job_that_could_not_be_read_once_is_read_when_it_can_be(
    tmp_path: Path, part: str
) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    hindered = write_healthy_run(root, job=12, nodes=("n1", "n2")).directory / part
    mode = hindered.stat().st_mode
    hindered.chmod(0o666)  # others can write, so it is refused
    assert indexed(root, index) == set()

    hindered.chmod(mode)

    assert indexed(root, index) == {"n1", "n2"}
    assert troubles_of(root, index) == {}


def test_a_job_that_cannot_be_read_any_more_keeps_what_was_read_of_it(tmp_path: Path) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    run = write_healthy_run(root, job=12, nodes=("n1", "n2"))
    assert indexed(root, index) == {"n1", "n2"}

    run.directory.chmod(0o777)
    assert indexed(root, index) == {"n1", "n2"}
    assert list(troubles_of(root, index).values()) == [1]

    shutil.rmtree(run.directory.parent)
    assert indexed(root, index) == set()


def troubles_of(root: Path, index: Path) -> dict[str, int]:
    with refresh.opened(place.choose(str(index), {}, root), root, now_s=NOW_S) as found:
        return found.troubles()


def test_two_processes_index_the_same_journals_at_once(tmp_path: Path) -> None:
    root = tmp_path / "journal"
    for job in range(40):
        write_healthy_run(root, job=100 + job, nodes=("n1", "n2"))
    words = ("history", "n1", "--json", f"--journal={root}", f"--index={tmp_path / 'index'}")

    processes = [start(*words) for _ in range(3)]
    ends = [finish(each) for each in processes]

    assert [each.code for each in ends] == [0, 0, 0], ends
    counts = [len(json.loads(each.stdout)["nodes"][0]["checks"]) for each in ends]
    assert counts == [40, 40, 40]


@pytest.mark.heavy
def test_one_that_is_interrupted_keeps_what_it_has_and_says_nothing(tmp_path: Path) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    for job in range(300):
        write_healthy_run(root, job=100 + job, nodes=("n1", "n2"))
    process = start("lemons", f"--journal={root}", f"--index={index}")
    while process.poll() is None and not index.exists():
        pass
    process.send_signal(signal.SIGINT)
    ended = finish(process)

    assert ended.code in {130, 0}, ended
    assert "Traceback" not in ended.stderr
    done = slurm_health("history", "n1", "--json", f"--journal={root}", f"--index={index}")
    assert len(json.loads(done.stdout)["nodes"][0]["checks"]) == 300
