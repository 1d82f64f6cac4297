# SPDX-License-Identifier: Apache-2.0
"""Job ids that were given again, and how long a job waited in the queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.records.errors import UsageError
from slurm_health.report.find import load
from slurm_health.report.latest import latest_jobs
from slurm_health.report.table import job_text
from slurm_health.system import journal
from tests.support.journals import STARTED_S, Clock, RunJournal

DAY_S = 86_400.0
SUBMITTED_S = int(STARTED_S) - 42
BEGUN_S = int(STARTED_S) - 2


def begun(
    root: Path, label: str, *, after_s: float = 0.0, submitted: bool = True, queued_s: int = 40
) -> RunJournal:
    """Write a run that began so long after the usual time, two seconds after its start by Slurm."""
    run = RunJournal(root, label=label, clock=Clock(STARTED_S + after_s))
    start = BEGUN_S + int(after_s)
    run.start(start_time_s=start, submit_time_s=start - queued_s if submitted else None)
    return run


@pytest.mark.parametrize("submitted", [True, False])
def test_a_job_with_an_id_that_was_given_again_stands_by_itself(
    tmp_path: Path, *, submitted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    begun(tmp_path, "0", submitted=submitted)
    begun(tmp_path, "0-2", after_s=DAY_S, submitted=submitted)

    last, before = (load(tmp_path, "12", earlier=number) for number in (0, 1))

    assert [run.label for run in last.runs] == ["0-2"]
    assert [run.label for run in before.runs] == ["0"]
    assert "an earlier job had the id 12 too, on 2023-11-14 22:13: --earlier" in caplog.text


def test_attempts_of_an_older_job_are_not_those_of_a_newer_one(tmp_path: Path) -> None:
    begun(tmp_path, "0", submitted=False)
    begun(tmp_path, "1", after_s=60, submitted=False)
    begun(tmp_path, "0-2", after_s=DAY_S, submitted=False)

    assert [run.label for run in load(tmp_path, "12").runs] == ["0-2"]
    assert [run.label for run in load(tmp_path, "12", earlier=1).runs] == ["0", "1"]


def test_several_checks_of_one_start_are_one_job(tmp_path: Path) -> None:
    for label, after_s in (("0", 0.0), ("0-2", 0.0)):
        run = RunJournal(tmp_path, label=label, clock=Clock(STARTED_S + after_s))
        run.start(start_time_s=BEGUN_S)

    assert [run.label for run in load(tmp_path, "12").runs] == ["0", "0-2"]


def test_an_earlier_job_that_was_never_there_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    begun(tmp_path, "0")

    with pytest.raises(UsageError, match="no earlier job had the id 12"):
        load(tmp_path, "12", earlier=1)


def test_the_list_of_jobs_has_the_last_one_of_an_id(tmp_path: Path) -> None:
    begun(tmp_path, "0").finish("stop", exit_code=1, reason="of old")
    begun(tmp_path, "0-2", after_s=DAY_S).finish("proceed", reason="of late")

    environ = {"PATH": "/nowhere"}
    (job,) = latest_jobs(tmp_path, 5, cluster=None, now_s=STARTED_S + DAY_S, environ=environ)

    assert (job.attempts, job.started_s) == (1, STARTED_S + DAY_S)


def test_an_array_task_with_an_id_that_was_given_again_is_the_new_one(tmp_path: Path) -> None:
    for job in (13, 15):
        run = RunJournal(tmp_path, job=job)
        run.start(array="12_3")
        (started,) = (
            entry.record
            for entry in journal.read_all(run.directory, journal.MASTER)
            if entry.kind == "run_started"
        )
        journal.link_array_task(tmp_path, started)  # type: ignore[arg-type]

    assert load(tmp_path, "12_3").runs[0].started.job_id == 15  # type: ignore[union-attr]


# --- the queue -----------------------------------------------------------------------------------


def test_the_time_in_the_queue_is_told_for_each_attempt(tmp_path: Path) -> None:
    first = begun(tmp_path, "0")
    first.judge()
    first.act("requeue")
    second = RunJournal(tmp_path, label="1", clock=Clock(first.clock.now_s + 12.0))
    second.start(start_time_s=int(first.clock.now_s) + 10, submit_time_s=SUBMITTED_S)
    second.judge()

    report = load(tmp_path, "12")
    text = job_text(report)

    assert [run.queued_s for run in report.runs] == [40.0, pytest.approx(10.0, abs=1.0)]
    assert "-2.0  started by Slurm after 40 s in the queue" in text


def test_a_time_in_the_queue_that_clocks_contradict_is_not_told(tmp_path: Path) -> None:
    begun(tmp_path, "0", queued_s=-60)

    assert load(tmp_path, "12").runs[0].queued_s is None
