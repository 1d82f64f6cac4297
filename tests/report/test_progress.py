# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.records.records import WorkersFailed
from slurm_health.records.script_records import (
    Diagnosed,
    EventKind,
    ProgressSeen,
    ScriptEnded,
    ScriptStarted,
    TrainingEvent,
)
from slurm_health.report.build import job_report
from slurm_health.report.post_mortem import lines_while_training
from slurm_health.report.progress import JobActivity, followed, progress
from slurm_health.report.read import read_run
from slurm_health.report.summary import summary_of
from slurm_health.system import journal
from tests.support.journals import RunJournal, write_healthy_run


def run_of(tmp_path: Path) -> RunJournal:
    return RunJournal(tmp_path, nodes=["n1", "n2", "n3", "n4"])


def seen(run: RunJournal, *, after_s: float = 0.0) -> JobActivity:
    return progress(read_run(run.directory), run.clock.now_s + after_s)


def test_before_the_first_round_nodes_that_are_ready_are_counted(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert seen(run) == JobActivity("waiting for the check to begin")
    run.start()
    assert seen(run).text.startswith("loading: 4 of 4 nodes ready, 0.5 s since")
    run.write("n2", WorkersFailed(node="n2", launch=1, reason="no torch"))
    assert "4 of 4 nodes ready, 1 unusable" in seen(run).text


def test_in_a_round_the_pairs_are_counted_of_which_both_members_have_reported(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path)
    run.start()
    run.begin_round(0, [["n1"], ["n2"], ["n3"], ["n4"]])
    assert seen(run).text.startswith("round 0: 0 of 4 nodes done")
    run.end_round(0)
    assert seen(run).text.startswith("round 0 has ended")
    run.begin_round(1, [["n1", "n2"], ["n3", "n4"]])
    run.measure(1, ["n3", "n4"])
    assert seen(run, after_s=4).text.startswith("round 1: 1 of 2 pairs done, 5.5 s since")


@pytest.mark.parametrize(
    ("disposition", "later_s", "text", "over"),
    [
        ("proceed", 0, "the check has ended", False),  # the script is about to start
        ("proceed", 60, "the check has ended", True),  # it was a check by hand
        ("stop", 0, "the check has ended", True),
        ("requeue", 600, "the check has ended; the job waits for its next attempt", False),
    ],
)
def test_what_follows_a_check_depends_on_what_becomes_of_the_job(
    tmp_path: Path, disposition: str, later_s: float, text: str, over: bool
) -> None:
    run = run_of(tmp_path)
    run.start()
    run.judge()
    assert seen(run).text.startswith("acting on the verdict")
    run.finish(disposition)
    assert seen(run, after_s=later_s) == JobActivity(text, over)


def test_a_job_is_followed_until_its_script_has_ended(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.start()
    run.finish("proceed")
    run.write(journal.SUPERVISOR, ScriptStarted(script="train.sh", pid=1))
    assert seen(run, after_s=90) == JobActivity("the script has run for 90 s")

    ended = write_healthy_run(tmp_path, job=13)
    assert seen(ended) == JobActivity("the script ended after 41 s, exit 0", over=True)


def test_a_script_that_was_started_again_runs(tmp_path: Path) -> None:
    run = write_healthy_run(tmp_path)
    run.write(journal.SUPERVISOR, ScriptStarted(script="train.sh", pid=2, restart=1))

    assert seen(run, after_s=5) == JobActivity("the script has run for 5.0 s")
    (told,) = job_report([read_run(run.directory)]).runs
    assert told.script is not None
    assert told.script.exit_code is None
    done = summary_of(job_report([read_run(run.directory)])).done
    assert done == "the script was started again; train.sh started, end not recorded yet"


def test_a_script_that_was_started_again_after_a_check_is_followed(tmp_path: Path) -> None:
    first = write_healthy_run(tmp_path)
    check = RunJournal(tmp_path, label="0-2", clock=first.clock)
    check.pass_check()

    def activity() -> JobActivity:
        runs = [read_run(run.directory) for run in (first, check)]
        return progress(followed(runs), first.clock.now_s + 1)

    assert activity().text == "the check has ended"
    again = ScriptStarted(script="train.sh", pid=2, restart=1)
    first.write(journal.SUPERVISOR, again, after_s=1.0)
    assert activity() == JobActivity("the script has run for 1.0 s")
    ended = ScriptEnded(exit_code=0, signal=0, duration_s=9.0)
    first.write(journal.SUPERVISOR, ended, after_s=9.0)
    assert activity() == JobActivity("the script ended after 9.0 s, exit 0", over=True)


def test_without_a_heartbeat_the_last_step_its_age_and_stopped_ranks_are_told(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path)
    run.start()
    run.finish("proceed")
    run.write(journal.SUPERVISOR, ScriptStarted(script="train.sh", pid=1))
    run.write(journal.MONITOR, ProgressSeen(node="n1", ranks=2))
    assert seen(run).text.endswith("; no heartbeat; no line of the output counts steps so far")

    line = "step 20 loss 0.3"
    run.write(
        journal.MONITOR,
        ProgressSeen(node="n1", ranks=2, stopped=[1], step=20, line=line, age_s=12.0),
    )
    told = f"no heartbeat; step 20, seen 42 s ago ({line!r}); rank 1 on n1 is stopped"
    assert seen(run, after_s=30).text.endswith(f"; {told}")
    report = job_report([read_run(run.directory)], now_s=run.clock.now_s + 30)
    assert ("so far", told) in lines_while_training(report.runs[-1])

    run.write(journal.MONITOR, ProgressSeen(node="n1", ranks=2, beating=True))
    assert seen(run, after_s=30).text == "the script has run for 30 s"


def test_a_script_that_hangs_is_said_to_until_it_goes_on(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.start()
    run.finish("proceed")
    run.write(journal.SUPERVISOR, ScriptStarted(script="train.sh", pid=1))
    stopped = Diagnosed(
        cause="stopped", description="it is stopped", attribution="undecided", sureness="certain"
    )
    run.write(
        journal.MONITOR,
        TrainingEvent(
            event=EventKind.HANG, stalled_s=33.0, usual_s=25.0, step=8, diagnosed=stopped
        ),
    )
    hangs = seen(run, after_s=60)
    assert hangs.text.startswith("the script hangs, no step for 93 s; it has run for ")
    assert not hangs.over

    run.write(journal.MONITOR, TrainingEvent(event=EventKind.HANG_OVER, stalled_s=60.0, step=9))
    assert seen(run).text.startswith("the script has run for ")
