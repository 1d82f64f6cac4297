# SPDX-License-Identifier: Apache-2.0
"""`slurm-health advise` as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_health.records.script_records import Diagnosed
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from tests.support.command_line import Done, slurm_health
from tests.support.journals import Clock, RunJournal

DAY_S = 86400
LONG_AGO = "--days=3650"  # the journals of these tests are years old
NODES = tuple(f"n{number}" for number in range(1, 9))


def write_jobs(root: Path, *, jobs: int = 100) -> None:
    """Write jobs of eight nodes, one a day, each for ten hours.

    In four of them another node is slow, in two a node is held at fault when the script fails.
    """
    for number in range(jobs):
        clock = Clock(1_700_000_000.0 + number * DAY_S)
        run = RunJournal(root, job=100 + number, nodes=NODES, clock=clock)
        run.start()
        slow = number // 20 if number % 20 == 0 and number else None
        run.judge(
            *(
                [NodeVerdict(node=NODES[slow], level=Level.SLOW, reason="1.4 times as slow")]
                if slow is not None
                else []
            )
        )
        run.finish("proceed")
        run.run_script(duration_s=36_000.0)
        if number in {33, 66}:
            run.write(journal.POST_MORTEM, failed_on(NODES[number % 8]))


def failed_on(node: str) -> Diagnosed:
    return Diagnosed(
        cause="gpu-lost",
        description=f"a GPU of {node} was lost",
        attribution="node fault",
        sureness="certain",
        nodes=[node],
        accused=[node],
    )


def called(tmp_path: Path, *words: str) -> Done:
    environ = {
        "SLURM_HEALTH_JOURNAL": str(tmp_path / "journal"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    return slurm_health("advise", *words, environ=environ)


def words_of(done: Done) -> str:
    return " ".join(done.stdout.split())


def test_a_hundred_jobs_give_an_advice_with_what_it_rests_on(tmp_path: Path) -> None:
    write_jobs(tmp_path / "journal")

    done = called(tmp_path, LONG_AGO, "-N", "64")

    assert done.code == 0, done
    told = words_of(done)
    assert "lab: 8 nodes checked in the last 3650 days: 800 starts of a job on a node" in told
    assert "8000 hours of a script on a node" in told
    assert "bad at the start of a job: 4 times, on 4 nodes; 0.5 in 100 starts" in told
    assert "(95% interval 0.14 to 1.3)" in told
    assert "failed under a script: 2 times, on 2 nodes; 6 in 1000 node-days" in told
    (row,) = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["64"]]
    assert row == ["64", "2", "1", "3", "3", "1", "5"]
    assert "look at n2: suspect, 2 of 100 jobs: too few to tell n3: suspect, 2" in told
    assert "other nodes: 2 with one bad job, 4 with none in ten or more" in told


def test_json_has_every_figure(tmp_path: Path) -> None:
    write_jobs(tmp_path / "journal")

    done = called(tmp_path, LONG_AGO, "-N", "64", "--hours=240", "--risk=0.01", "--json")

    document = json.loads(done.stdout)
    (cluster,) = document["clusters"]
    (job,) = cluster["jobs"]
    assert (document["version"], document["risk"], document["hours"]) == (1, 0.01, 240)
    assert cluster["starts"]["events"] == 4
    assert cluster["starts"]["exposure"] == 800
    assert cluster["starts"]["rate"] == 0.005
    assert cluster["hours"]["enough"] is True
    assert job["nodes"] == 64
    assert job["kept"]["count"] > job["at_start"]["count"] >= 2
    assert job["kept"]["recorded"] == []


def test_with_little_history_the_advice_says_so(tmp_path: Path) -> None:
    write_jobs(tmp_path / "journal", jobs=5)

    done = called(tmp_path, LONG_AGO, "-N", "64")

    told = words_of(done)
    assert "too little for advice (40 of 100 starts)" in told
    assert "too little for advice (400 of 1000 hours)" in told
    assert "as recorded on another cluster" in told
    (row,) = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["64"]]
    assert row[1] == "1"


def test_without_any_journal_nothing_is_advised(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()

    done = called(tmp_path, LONG_AGO)

    assert done.code == 0, done
    assert "no check is in the journals that you may read" in done.stdout


def test_what_damaged_journals_leave_out_is_said(tmp_path: Path) -> None:
    write_jobs(tmp_path / "journal", jobs=20)
    for number in range(100, 105):
        file = tmp_path / "journal" / "lab" / str(number) / "0" / "master.jsonl"
        file.write_bytes(b"\x00 no record\n" + file.read_bytes())

    done = called(tmp_path, LONG_AGO, "-N", "64")

    assert done.code == 0, done
    said = " ".join(done.stderr.split())
    assert "5 jobs could not be read, or not wholly: it has damaged lines, which count" in said


def test_of_the_sizes_that_nobody_named_each_leaves_nodes_to_spare(tmp_path: Path) -> None:
    write_jobs(tmp_path / "journal", jobs=13)

    done = called(tmp_path, LONG_AGO)

    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows if len(row) == 7 and row[0].isdigit()] == ["4"]


@pytest.mark.parametrize("words", [("--risk=0",), ("-N", "0"), ("--hours=0",)])
def test_an_impossible_job_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert called(tmp_path, *words).code == 2
