# SPDX-License-Identifier: Apache-2.0
"""What Slurm says of a job that has no journal, and of the nodes of one that has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_health.records.records import MasterStopped
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.report.layout import Page
from slurm_health.report.model import JobReport, State
from slurm_health.report.read import load
from slurm_health.report.slurm_now import (
    explain,
    nodes_now,
    out_of_use,
    waiting_again,
    with_unseen_end,
    with_who_cancelled,
    word,
)
from slurm_health.report.summary import summary_of
from slurm_health.system.slurm.parsing import Job
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import STARTED_S, RunJournal, write_healthy_run, write_started_script

ROOT = Path(__file__).parents[2]
OURS = "#!/bin/sh\nexec python3 -E -P -m slurm_health supervise --check=standard -- x\n"


def job(*states: str, reason: str = "None", **fields: str) -> Job:
    return Job(job_id=12, states=frozenset(states), reason=reason, fields=fields)


@pytest.mark.parametrize(
    ("found", "script", "said"),
    [
        (job("PENDING", reason="Resources"), OURS, "it is pending (Resources): its nodes are"),
        (job("PENDING"), OURS, "it is pending: its nodes are checked when it starts."),
        (
            job("PENDING", reason="PartitionConfig"),
            OURS,
            "it is pending (PartitionConfig): it cannot start as it was submitted: its partition",
        ),
        (job("PENDING"), "#!/bin/sh\ntrue\n", "not submitted with slurm-health sbatch"),
        (job("RUNNING"), "#!/bin/sh\ntrue\n", "nothing was checked (running)"),
        (
            job("RUNNING", NodeList="n1", StdOut="/a/s.out"),
            OURS,
            "has not begun yet; if it cannot, the job's output says why: /a/s.out.",
        ),
        (job("FAILED", NodeList="n1", StdOut="/a/s.out"), OURS, "Its output, /a/s.out, says why."),
        (
            job("FAILED", NodeList="n1", StdOut="/a/s.out", ExitCode="0:1"),
            OURS,
            "it ended before a check began (failed, killed by SIGHUP).",
        ),
        (job("CANCELLED"), OURS, "it ended before a check began (cancelled)."),
        (
            job("CONFIGURING", NodeList="n1", StdOut="/a/s.out"),
            OURS,
            "it is starting (configuring): its nodes are checked once they are ready.",
        ),
        (job("SUSPENDED"), OURS, "it is suspended, and its check begins no sooner"),
        (job("STOPPED"), OURS, "it is suspended, and its check begins no sooner"),
        (job("SPECIAL_EXIT"), OURS, "it is held (special_exit), and starts no sooner than"),
        (job("REQUEUED"), OURS, "it was requeued (requeued): its nodes are checked when it starts"),
        (
            job("COMPLETING", NodeList="n1", StdOut="/a/s.out"),
            OURS,
            "it is ending (completing), and its check has not begun: its output, /a/s.out, says",
        ),
        (job("RESIZING"), OURS, "Slurm says that it is resizing, and its check has not begun yet."),
        (job("FAILED"), "", "it ended before a check began (failed)."),
    ],
)
def test_what_slurm_knows_says_why_there_is_no_journal(found: Job, script: str, said: str) -> None:
    assert said in explain(found, script)


@pytest.mark.parametrize("name", ["check-then-torchrun", "torchrun-with-check"])
def test_a_script_that_checks_its_nodes_itself_is_not_said_to_check_none(name: str) -> None:
    script = (ROOT / "sbatch_templates" / f"{name}.sbatch").read_text(encoding="utf-8")

    said = explain(job("PENDING", reason="Resources"), script)

    assert said == "it is pending (Resources): its nodes are checked when it starts."


@pytest.mark.parametrize(
    "line",
    ["slurm-health run train.py", "# slurm-health check", "slurm-health run \\\n  a.py\nx --check"],
)
def test_a_script_that_calls_no_check_is_said_to_check_none(line: str) -> None:
    said = explain(job("RUNNING"), f"#!/bin/sh\n{line}\n")

    assert said.startswith("it was not submitted with slurm-health sbatch, so nothing was checked")


@pytest.mark.parametrize(
    ("state", "final", "waits"),
    [
        ("FAILED", True, False),
        ("CONFIGURING", False, True),
        ("STOPPED", False, False),
    ],
)
def test_only_a_job_that_has_ended_is_not_waited_for(
    slurm: FakeSlurm, state: str, final: bool, waits: bool
) -> None:
    slurm.run_job(12, ["n1"], state=state, script=OURS)

    said = word("12", slurm.environ())

    assert (said.final, said.waits) == (final, waits)
    assert ("ended before a check" in said.text) == final


def test_a_job_that_never_started_has_no_output_to_look_at() -> None:
    assert "output" not in explain(job("CANCELLED", StdOut="/a/s.out"), OURS)


def test_of_somebody_elses_job_it_is_said_whom_to_ask() -> None:
    bobs = job("RUNNING", UserId="bob(1002)")

    said = explain(bobs, "", uid=1001)

    assert "it is bob's job (running)" in said
    assert "ask bob, or an administrator, for `slurm-health report 12`" in said
    assert "bob" not in explain(bobs, OURS, uid=1002)


@pytest.mark.parametrize("script", ["", OURS, "#!/bin/sh\nsleep 1\n"])
def test_root_who_may_read_every_journal_is_told_what_its_owner_is(script: str) -> None:
    bobs = job("RUNNING", UserId="bob(1002)")
    assert explain(bobs, script, uid=0) == explain(bobs, script, uid=1002)


NODES = ["n1", "n2", "n4", "n5", "n6"]
NOTE = "shealth: gpu 3 lost"
PATIENCE_S = 60.0  # each answer is a process, on a machine that may be busy


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    slurm = FakeSlurm(tmp_path / "slurm", [*NODES, "n7"])
    for name in ("n4", "n7"):
        slurm.change_node(name, state="IDLE+DRAIN", reason=NOTE)
    return slurm


def lines(
    root: Path, slurm: FakeSlurm, *, cluster: str = "lab", later_s: float = 60.0
) -> list[str]:
    write_healthy_run(root, cluster=cluster)
    out = out_of_use(
        load(root, "12"), now_s=STARTED_S + later_s, environ=slurm.environ(), patience_s=PATIENCE_S
    )
    return nodes_now(out, Page())


def test_a_node_of_the_job_that_was_drained_since_is_told_with_why(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    head, line = lines(tmp_path / "journal", slurm)

    assert head.split()[:2] == ["NOW", "STATE"]
    assert line.split(maxsplit=2)[:2] == ["n4", "idle+drain"]
    assert f"{NOTE} [root@" in line


def test_nothing_is_told_of_the_nodes_of_an_old_job_or_of_another_cluster(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    assert lines(tmp_path / "old", slurm, later_s=8 * 86400.0) == []
    assert slurm.calls("scontrol") == []
    assert lines(tmp_path / "other", slurm, cluster="east") == []


def test_nothing_is_told_where_slurm_does_not_answer(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.set(refuse={"node": "slurm_load_node: Unable to contact slurm controller"})

    assert lines(tmp_path / "journal", slurm) == []


STARTED = "train.sh started, end not recorded"


def seen(root: Path, slurm: FakeSlurm, now_s: float) -> JobReport:
    """Return the report of the job with what Slurm says of an end that nothing recorded."""
    report = load(root, "12", now_s=now_s)
    return with_unseen_end(report, now_s=now_s, environ=slurm.environ(), patience_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("state", "done", "following"),
    [
        (
            "FAILED",
            f"{STARTED}; Slurm says that the job has ended (failed, killed by SIGKILL)",
            "what ended it may stand at the end of the job's output",
        ),
        (
            "",
            f"{STARTED}; the job has ended: Slurm no longer knows it",
            "what ended it may stand at the end of the job's output",
        ),
        *(
            (state, f"{STARTED} yet", "slurm-health report --follow 12 follows it")
            for state in ("RUNNING", "COMPLETING", "CONFIGURING", "REQUEUE_HOLD", "RESIZING")
        ),
    ],
)
def test_a_job_whose_end_nothing_recorded_is_told_as_slurm_says_that_it_ended(
    tmp_path: Path, slurm: FakeSlurm, state: str, done: str, following: str
) -> None:
    write_started_script(tmp_path, script="train.sh")
    if state:
        slurm.run_job(12, NODES, state=state, ExitCode="0:9")

    told = summary_of(seen(tmp_path, slurm, STARTED_S + 60))

    assert told.done == done
    assert told.next.startswith(following)


@pytest.mark.parametrize("later_s", [60, 8 * 86400])
@pytest.mark.parametrize("disposition", ["requeue", "hold"])
def test_a_job_that_was_cancelled_while_it_waited_after_its_check_has_ended(
    tmp_path: Path, slurm: FakeSlurm, disposition: str, later_s: float
) -> None:
    run = RunJournal(tmp_path)
    run.start()
    run.judge(NodeVerdict(node="n3", level=Level.FAULTY, reason="lost"))
    run.act(disposition)
    run.finish(disposition)
    now_s = run.clock.now_s + later_s
    told = []
    for state in ("PENDING", "CANCELLED"):
        slurm.run_job(12, [], state=state)
        told.append(seen(tmp_path, slurm, now_s))

    assert [each.ended for each in told] == ["", "Slurm says that the job has ended (cancelled)"]
    held = ["to run it anyway" in summary_of(each).next for each in told]
    assert held == [disposition == "hold", False]


@pytest.mark.parametrize("state", ["FAILED", ""])
def test_a_check_whose_job_has_ended_does_not_run_any_more(
    tmp_path: Path, slurm: FakeSlurm, state: str
) -> None:
    run = RunJournal(tmp_path)
    run.start()
    run.begin_round(0, [["n1", "n2"]])
    if state:
        slurm.run_job(12, NODES, state=state, ExitCode="0:9")

    told = seen(tmp_path, slurm, STARTED_S + 10)

    alone = load(tmp_path, "12", now_s=STARTED_S + 10)
    assert alone.runs[-1].note == "still running: round 0"
    assert told.runs[-1].note == "the master stopped before a verdict, in round 0"
    assert told.runs[-1].state is State.STOPPED
    assert "the job has ended" in summary_of(told).done
    assert summary_of(told).next.startswith("what ended it may stand at the end of")


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_check_whose_job_has_not_ended_runs_as_far_as_it_says(
    tmp_path: Path, slurm: FakeSlurm, state: str
) -> None:
    RunJournal(tmp_path).start()
    slurm.run_job(12, NODES, state=state)
    now_s = STARTED_S + 10

    assert seen(tmp_path, slurm, now_s) == load(tmp_path, "12", now_s=now_s)


@pytest.mark.parametrize(
    ("state", "waits"),
    [
        ("PENDING", "pending again (BeginTime)"),
        ("REQUEUED", "pending again (BeginTime)"),
        ("REQUEUE_HOLD", "held (BeginTime)"),
        ("CONFIGURING", "about to start again (BeginTime)"),
        ("COMPLETED", ""),
    ],
)
def test_a_job_whose_next_attempt_is_to_come_is_told_how_it_waits(
    tmp_path: Path, slurm: FakeSlurm, state: str, waits: str
) -> None:
    run = RunJournal(tmp_path)
    run.start()
    run.master(MasterStopped(reason="SIGTERM", job="the job was requeued"))
    slurm.run_job(12, [], state=state, Reason="BeginTime")

    told = waiting_again(load(tmp_path, "12"), now_s=STARTED_S + 60, environ=slurm.environ())

    assert told.waits == waits


def test_what_ended_a_script_that_was_killed_is_asked_where_no_post_mortem_could_say(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    slurm.set(accounting="accounting_storage/slurmdbd", accounts={"12": "CANCELLED by 0"})
    slurm.run_job(12, ["n1", "n2"], state="CANCELLED")
    run = write_healthy_run(tmp_path)
    run.run_script(signal=15, duration_s=2.8)

    told = seen(tmp_path, slurm, STARTED_S + 60)
    told = with_who_cancelled(told, environ=slurm.environ(), patience_s=PATIENCE_S)

    killed = "train.sh ran 2.8 s, killed by SIGTERM"
    assert summary_of(told).done == f"{killed}; cancelled by root"


@pytest.mark.parametrize(
    ("settings", "done"),
    [
        ({"accounting": "accounting_storage/slurmdbd"}, "cancelled by root"),
        ({"accounting": "accounting_storage/none"}, ""),
        ({"accounting": "accounting_storage/slurmdbd", "accounts": {"12": "FAILED"}}, ""),
    ],
)
def test_who_cancelled_a_job_is_told_where_accounts_say_it(
    tmp_path: Path, slurm: FakeSlurm, settings: dict[str, object], done: str
) -> None:
    slurm.set(**{"accounts": {"12": "CANCELLED by 0"}, **settings})
    run = RunJournal(tmp_path)
    run.start()
    run.begin_round(0, [["n1", "n2"]])
    run.master(MasterStopped(reason="SIGTERM", job="the job was cancelled"))

    told = with_who_cancelled(load(tmp_path, "12"), environ=slurm.environ(), patience_s=PATIENCE_S)

    assert summary_of(told).done == done


def test_a_job_that_was_cancelled_while_it_waited_after_a_requeue_is_told_so(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    slurm.set(accounting="accounting_storage/slurmdbd", accounts={"12": "CANCELLED by 0"})
    run = RunJournal(tmp_path)
    run.start()
    run.master(MasterStopped(reason="SIGTERM", job="the job was requeued"))
    report = load(tmp_path, "12")

    told = with_who_cancelled(report, environ=slurm.environ(), patience_s=PATIENCE_S)
    waiting = with_who_cancelled(
        replace(report, waits="pending"), environ=slurm.environ(), patience_s=PATIENCE_S
    )

    assert (told.cancelled_by, waiting.cancelled_by) == ("root", "")


def test_accounts_are_not_asked_about_a_job_that_nobody_cancelled(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    write_healthy_run(tmp_path)

    with_who_cancelled(load(tmp_path, "12"), environ=slurm.environ(), patience_s=PATIENCE_S)

    assert slurm.calls("sacct") == slurm.calls("scontrol") == []
