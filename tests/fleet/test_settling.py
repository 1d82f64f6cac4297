# SPDX-License-Identifier: Apache-2.0
"""When a job's journal is no longer looked at: not before nothing more can come of the job."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from slurm_health.records.script_records import Attribution, Diagnosed, ScriptStarted
from slurm_health.system import journal
from tests.fleet.test_index import indexed
from tests.fleet.test_reading import opened_here
from tests.support.journals import Clock, RunJournal, write_healthy_run

BEGAN_S = 1_700_000_000.0
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def written_at(root: Path, job: int, time_s: float) -> None:
    """Let all of a job's files be written last at this time."""
    for path in (root / "lab" / str(job)).rglob("*.jsonl"):
        os.utime(path, (time_s, time_s))


def checked_only(root: Path, *, label: str = "0", job: int = 12) -> RunJournal:
    """Write a check that a script has called itself, as `slurm-health run` does."""
    run = RunJournal(root, job=job, label=label, nodes=("n1", "n2"), clock=Clock(BEGAN_S))
    run.pass_check()
    return run


def preempted(root: Path) -> RunJournal:
    run = checked_only(root)
    run.run_script(exit_code=143, signal=15)
    return run


def preempted_and_ended_well(root: Path) -> RunJournal:
    run = checked_only(root)
    run.run_script()
    told = Diagnosed(
        cause="requeued", description="", attribution=Attribution.OUTSIDE, sureness="certain"
    )
    run.write(journal.POST_MORTEM, told)
    return run


def started_again(root: Path) -> RunJournal:
    run = checked_only(root)
    run.run_script(exit_code=1)
    run.write(journal.SUPERVISOR, ScriptStarted(script="train.sh", pid=201, restart=1))
    return run


def checked_beside_a_script_that_runs(root: Path) -> RunJournal:
    run = checked_only(root)
    run.write(journal.SUPERVISOR, ScriptStarted(script="train.sh", pid=201))
    checked_only(root, label="0-2").run_script()
    return run


@pytest.mark.parametrize(
    "begin",
    [
        checked_only,
        preempted,
        preempted_and_ended_well,
        started_again,
        checked_beside_a_script_that_runs,
    ],
)
def test_a_job_that_may_come_back_is_looked_at_again_days_later(
    tmp_path: Path, begin: object
) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    assert callable(begin)
    begin(root)
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


def test_a_job_that_was_looked_at_before_its_first_check_was_there_is_looked_at_again(
    tmp_path: Path,
) -> None:
    root, index = tmp_path / "journal", tmp_path / "index"
    made = root / "lab" / "12"
    made.mkdir(mode=0o700, parents=True)
    assert indexed(root, index, now_s=made.stat().st_mtime) == set()

    write_healthy_run(root, job=12, nodes=("n1", "n2"))

    assert indexed(root, index, now_s=made.stat().st_mtime + HOUR_S) == {"n1", "n2"}


@pytest.mark.parametrize("looks_s", [(HOUR_S, 30 * DAY_S), (30 * DAY_S,)])
def test_a_job_that_was_looked_at_when_it_was_final_costs_nothing_more(
    tmp_path: Path, looks_s: tuple[float, ...]
) -> None:
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
