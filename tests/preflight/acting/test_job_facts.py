# SPDX-License-Identifier: Apache-2.0
"""What is known of a job before anything is done about its nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_health.preflight.acting.job_facts import (
    earlier_runs,
    hold_obstacle,
    left_behind,
    requeues,
)
from slurm_health.records.records import Action, ActionIntended, RunStarted
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system.slurm.parsing import Job
from tests.support.journals import RunJournal, run_started, write_requeued_job

JOB = 12


def started(attempt: int, **more: Any) -> RunStarted:
    return run_started(["n1"], attempt=attempt, **more)


def test_requeues_are_counted_from_the_earlier_attempts(tmp_path: Path) -> None:
    first, second = write_requeued_job(tmp_path, job=JOB)
    (first.directory.parent / "2").mkdir()

    assert requeues(earlier_runs(second.directory, started(1))) == 1
    assert requeues(earlier_runs(first.directory, started(0))) == 0
    assert requeues(earlier_runs(tmp_path / "nowhere" / "0", started(0))) == 0


@pytest.mark.parametrize(
    ("older", "newer"),
    [({}, started(0)), ({"submit_time_s": 5}, started(2, submit_time_s=9))],
    ids=["attempts that begin anew", "another time of submission"],
)
def test_requeues_of_an_older_job_with_the_same_id_do_not_count(
    tmp_path: Path, older: dict[str, Any], newer: RunStarted
) -> None:
    intended = ActionIntended(action=Action.REQUEUE, nodes=["n1"])
    run = RunJournal(tmp_path, job=JOB, label="1")
    run.start(**older)
    run.master(intended)

    assert requeues(earlier_runs(run.directory.parent / "0-2", newer)) == 0
    assert requeues(earlier_runs(run.directory.parent / "2", started(2))) == 1


def test_a_faulty_node_that_was_given_back_in_this_attempt_is_left_behind(tmp_path: Path) -> None:
    for label, node in (("0", "n2"), ("1", "n3"), ("1-2", "n4")):
        run = RunJournal(tmp_path, job=JOB, label=label)
        run.start()
        run.judge(NodeVerdict(node=node, level=Level.FAULTY, reason="no allgather"))
        run.judge(NodeVerdict(node="n5", level=Level.SLOW, reason="slow"))
    own = run.directory.parent / "1-3"

    assert left_behind(own, started(1), held=["n1"]) == ("n3", "n4")
    assert left_behind(own, started(1), held=["n1", "n4"]) == ("n3",)
    assert left_behind(own, started(2), held=["n1"]) == ()


def test_an_attempt_whose_journal_cannot_be_read_counts_as_a_requeue(tmp_path: Path) -> None:
    newer = tmp_path / "job" / "0"
    newer.mkdir(parents=True)
    (newer / "master.jsonl").write_text('{"v":99,"id":"master:0","time_s":0,"kind":"x"}\n')

    assert requeues(earlier_runs(tmp_path / "job" / "1", started(1))) == 1


@pytest.mark.parametrize("flag", ["1", "2"])
def test_a_job_that_slurm_has_requeued_itself_is_still_a_batch_job(flag: str) -> None:
    fields = {"BatchFlag": flag, "Requeue": "1", "ReqNodeList": "(null)"}
    job = Job(job_id=1, states=frozenset(), reason="", fields=fields)

    assert hold_obstacle(job) == ""
