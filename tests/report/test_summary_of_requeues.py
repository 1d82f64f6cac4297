# SPDX-License-Identifier: Apache-2.0
"""What is said first of a job that went back into the queue, or was started again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slurm_health.records.records import Action, ActionDone, ActionIntended
from slurm_health.records.script_records import (
    Diagnosed,
    EventKind,
    ScriptStarted,
    TrainingEvent,
)
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.report.read import load
from slurm_health.report.summary import Summary, summary_of
from slurm_health.report.table import job_text
from slurm_health.system import journal
from tests.report.test_summary import LOST, STOPPED, summary
from tests.support.journals import (
    Clock,
    RunJournal,
    write_healthy_run,
    write_run_with_a_faulty_node,
    write_started_script,
)


def test_a_script_that_was_started_again_tells_where(tmp_path: Path) -> None:
    run = write_started_script(tmp_path)
    run.write(
        journal.SUPERVISOR,
        ScriptStarted(script="/home/ml/train.sh", pid=2, restart=1, nodes=["n1", "n2", "n4"]),
    )

    assert summary(tmp_path).done.startswith("the script was started again on n[1-2,4]; ")


def test_many_requeues_are_counted(tmp_path: Path) -> None:
    clock = Clock()
    write_run_with_a_faulty_node(tmp_path, clock=clock)
    second = RunJournal(tmp_path, label="1", nodes=["n1", "n2", "n4"], clock=clock)
    second.start()
    second.master(
        ActionIntended(action=Action.EXCLUDE, nodes=["n4"]),
        ActionDone(action=Action.EXCLUDE, succeeded=True, nodes=["n4"]),
        ActionIntended(action=Action.REQUEUE),
        ActionDone(action=Action.REQUEUE, succeeded=True),
    )
    write_healthy_run(tmp_path, label="2", nodes=["n1", "n2", "n5", "n6"], clock=clock)

    done = summary(tmp_path).done

    assert done.startswith("drained n3, requeued 2 times without n[3-4] onto n[1-2,5-6]; ")


def leaves_after_a_failure(root: Path, label: str, clock: Clock) -> None:
    """Write an attempt whose script ends by a signal, after which the job leaves n3."""
    run = RunJournal(root, label=label, clock=clock)
    run.pass_check()
    run.run_script(signal=6)
    run.write(journal.POST_MORTEM, LOST)
    after = RunJournal(root, label=f"{label}-2", clock=clock)
    after.start()
    after.judge(NodeVerdict(node="n3", level=Level.FAULTY, reason="lost"))
    after.act("drain", ["n3"])
    after.act("exclude", ["n3"])
    after.act("requeue", by=journal.REQUEUE)
    after.finish("requeue")


def test_a_requeue_of_ours_after_a_script_failed_is_not_put_down_to_others(tmp_path: Path) -> None:
    clock = Clock()
    leaves_after_a_failure(tmp_path, "0", clock)
    write_healthy_run(tmp_path, label="1", nodes=["n1", "n2"], clock=clock)
    report = load(tmp_path, "12")

    assert [run.requeued for run in report.runs] == ["", "", ""]
    assert summary_of(report).done == (
        "train.sh ran 41 s, killed by SIGABRT, drained n3, requeued without it onto n[1-2];"
        " train.sh ran 41 s, exit 0"
    )


def test_requeues_are_counted_and_not_the_checks_before_them(tmp_path: Path) -> None:
    clock = Clock()
    for label in ("0", "1"):
        leaves_after_a_failure(tmp_path, label, clock)
    write_healthy_run(tmp_path, label="2", nodes=["n1", "n2"], clock=clock)

    assert summary(tmp_path).done.startswith("drained n3, requeued 2 times without n3 onto n[1-2];")


def test_a_requeue_by_others_is_told_beside_what_the_attempt_checked(tmp_path: Path) -> None:
    clock = Clock()
    leaves_after_a_failure(tmp_path, "0", clock)
    run = RunJournal(tmp_path, label="1", nodes=["n1", "n2"], clock=clock)
    run.pass_check()
    run.run_script(signal=15, duration_s=3.0)
    write_healthy_run(tmp_path, label="2", nodes=["n1", "n2"], clock=clock)

    assert summary(tmp_path).done.startswith(
        "train.sh ran 41 s, killed by SIGABRT, drained n3, requeued without it;"
        " train.sh ran 3.0 s, requeued by Slurm or by a person onto n[1-2];"
    )


REQUEUED = Diagnosed(
    cause="requeued",
    description="the job was requeued (scontrol requeue)",
    attribution="ended from outside",
    sureness="certain",
)


def test_a_requeue_by_a_person_or_the_script_is_told_as_one_and_is_no_failure(
    tmp_path: Path,
) -> None:
    run = write_started_script(tmp_path)
    run.run_script(signal=15, duration_s=25.0)
    run.write(journal.POST_MORTEM, REQUEUED)
    waits = summary_of(replace(load(tmp_path, "12"), waits="pending again (BeginTime)"))
    again = RunJournal(tmp_path, label="1", clock=run.clock)
    again.pass_check()
    again.run_script()

    told = "train.sh ran 25 s, requeued (scontrol requeue)"
    assert waits == Summary(
        found=("n[1-5]: all healthy",), done=f"{told}; pending again (BeginTime)", next=""
    )
    assert summary(tmp_path).done == f"{told} onto n[1-5]; train.sh ran 41 s, exit 0"
    assert "POST-MORTEM" not in job_text(load(tmp_path, "12"))


def test_what_is_next_does_not_ask_for_nodes_that_the_line_above_says_are_not_there(
    tmp_path: Path,
) -> None:
    run = RunJournal(tmp_path)
    run.start()
    run.judge(NodeVerdict(node="n3", level=Level.SLOW, slowdown=2.0, reason="slow"))
    few = "partition main has 4 nodes without n3, and the job needs 5: ask for fewer (--nodes)"
    run.finish("proceed", reason=f"n3: slow; {few}; continuing with n3 anyway")

    assert "--exclude=n3 and fewer nodes (--nodes)" in summary(tmp_path).next


def test_a_hang_comes_first_though_the_script_has_run_a_check_of_its_own_since(
    tmp_path: Path,
) -> None:
    run = write_started_script(tmp_path)
    own = RunJournal(tmp_path, label="0-2", clock=run.clock)
    own.pass_check()
    run.write(
        journal.MONITOR,
        TrainingEvent(
            event=EventKind.HANG, stalled_s=37.0, usual_s=30.0, step=35, diagnosed=STOPPED
        ),
    )
    told = summary(tmp_path)

    assert told.found[0].startswith("the script hangs (no step for 37 s after step 35): rank 1")
    assert told.next == STOPPED.advice


def test_a_hang_of_a_training_that_said_nothing_is_told_by_its_ranks(tmp_path: Path) -> None:
    run = write_started_script(tmp_path)
    hang = TrainingEvent(
        event=EventKind.HANG, stalled_s=55.0, usual_s=40.0, step=0, diagnosed=STOPPED, at_rest=True
    )
    run.write(journal.MONITOR, hang)

    told = summary(tmp_path).found[0]
    assert told.startswith("the script hangs (all ranks have only waited for 55 s): rank 1")


def test_a_script_that_was_started_again_has_left_its_hang_and_its_failure_behind(
    tmp_path: Path,
) -> None:
    run = write_started_script(tmp_path)
    hang = TrainingEvent(
        event=EventKind.HANG, stalled_s=37.0, usual_s=30.0, step=35, diagnosed=STOPPED
    )
    run.write(journal.MONITOR, hang, after_s=1.0)
    run.write(journal.POST_MORTEM, LOST, after_s=1.0)
    again = ScriptStarted(script="/home/ml/train.sh", pid=2, restart=1)
    run.write(journal.SUPERVISOR, again, after_s=1.0)

    assert summary(tmp_path).found == ("n[1-5]: all healthy",)
