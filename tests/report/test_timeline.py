# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from slurm_health.records.records import Action, ActionDone, ActionIntended
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.report.read import load
from slurm_health.report.table import job_text
from slurm_health.system import journal
from tests.support.journals import RunJournal, write_healthy_run, write_requeued_job

SLOW = NodeVerdict(node="n3", level=Level.SLOW, reason="matmul 2.1 times slower")


def lines(root: Path, width: int | None = 80) -> list[str]:
    """The events of a report, each without the blanks before it."""
    text = job_text(load(root, "12"), width=width)
    block = text.partition("TIMELINE")[2]
    return [line.strip() for line in block.splitlines()[1:]]


def test_every_act_is_told_before_and_after_in_seconds_from_the_start(tmp_path: Path) -> None:
    write_requeued_job(tmp_path)

    first, second = load(tmp_path, "12").runs

    assert [(event.after_s, event.what, event.action) for event in first.timeline] == [
        (0.0, "run_started", ""),
        (6.1, "verdict_reached", ""),
        (6.1, "action_intended", "exclude"),
        (6.2, "action_done", "exclude"),
        (6.2, "action_intended", "drain"),
        (6.3, "action_done", "drain"),
        (6.3, "run_finished", ""),
        (6.3, "action_intended", "requeue"),
        (6.4, "action_done", "requeue"),
    ]
    assert [event.after_s for event in second.timeline][-2:] == [4.9, 45.9]


def test_a_job_about_which_nothing_was_done_has_no_timeline(tmp_path: Path) -> None:
    write_healthy_run(tmp_path)

    assert "TIMELINE" not in job_text(load(tmp_path, "12"))


def test_an_act_that_failed_says_why(tmp_path: Path) -> None:
    run = RunJournal(tmp_path)
    run.start()
    run.judge(SLOW)
    run.master(
        ActionIntended(action=Action.DRAIN, nodes=["n3"]),
        ActionDone(action=Action.DRAIN, succeeded=False, nodes=["n3"], detail="Invalid user id"),
    )
    run.finish("stop", exit_code=1)

    assert lines(tmp_path)[-2:] == [
        "0.6  did not drain n3 (Invalid user id)",
        "0.6  the job ends",
    ]


def test_a_held_job_reads_as_held_although_nobody_lived_to_say_so(tmp_path: Path) -> None:
    run = RunJournal(tmp_path)
    run.start()
    run.judge(SLOW)
    run.master(ActionIntended(action=Action.HOLD, nodes=["n3"], reason="n3: one partner"))
    run.finish("hold", exit_code=3)

    assert "held the job (n3: one partner)" in job_text(load(tmp_path, "12"))
    assert lines(tmp_path)[-2:] == [
        "0.6  going to hold the job",
        "0.6  the job will be held",
    ]


def test_what_others_wrote_fits_the_terminal_and_does_not_act_on_it(tmp_path: Path) -> None:
    run, _ = write_requeued_job(tmp_path)
    detail = "\x1b[2J\nsbatch: error: failed: Job violates accounting/QOS policy of the site"
    run.write(journal.REQUEUE, ActionDone(action=Action.REQUEUE, succeeded=False, detail=detail))

    text = job_text(load(tmp_path, "12"), width=80)

    assert max(map(len, text.splitlines())) <= 80
    assert "violates" in text
    assert "\x1b" not in text
