# SPDX-License-Identifier: Apache-2.0
"""What Slurm says of a job that has no journal, and of the nodes of one that has."""

from pathlib import Path

import pytest

from slurm_health.records.records import MasterStopped
from slurm_health.records.script_records import Diagnosed
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.report.read import load
from slurm_health.report.slurm_now import asked, explain, word
from slurm_health.report.story import State, Story
from slurm_health.report.summary import summary_of
from slurm_health.system import journal
from slurm_health.system.slurm.parsing import Job
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import STARTED_S, RunJournal, write_healthy_run, write_started_script
from tests.support.rows import rows

ROOT = Path(__file__).parents[2]
OURS = "#!/bin/sh\nexec python3 -E -P -m slurm_health supervise --check=standard -- x\n"


@rows
def test_what_slurm_knows_says_why_there_is_no_journal(
    state: str,
    reason: str,
    fields: dict[str, str],
    script: str | None,
    uid: int,
    said: str,
    not_said: str | None,
) -> None:
    job = Job(job_id=12, states=frozenset({state}), reason=reason or "None", fields=fields)
    text = explain(job, OURS if script is None else script, uid=uid)
    assert said in text
    assert not_said is None or not_said not in text


@pytest.mark.parametrize("name", ["check-then-torchrun", "torchrun-with-check"])
def test_a_script_that_checks_its_nodes_itself_is_not_said_to_check_none(name: str) -> None:
    script = (ROOT / "sbatch_templates" / f"{name}.sbatch").read_text(encoding="utf-8")
    job = Job(job_id=12, states=frozenset({"PENDING"}), reason="Resources", fields={})

    said = explain(job, script)

    assert said == "it is pending (Resources): its nodes are checked when it starts."


@rows
def test_only_a_job_that_has_ended_is_not_waited_for(
    slurm: FakeSlurm, state: str, final: bool, waits: bool
) -> None:
    slurm.run_job(12, ["n1"], state=state, script=OURS)

    said = word("12", slurm.environ())

    assert (said.final, said.waits) == (final, waits)
    assert ("ended before a check" in said.text) == final


NODES = ["n1", "n2", "n4", "n5", "n6"]
NOTE = "shealth: gpu 3 lost"
PATIENCE_S = 60.0  # each answer is a process, on a machine that may be busy
DAY_S = 86400.0
CANCELLED = Diagnosed(
    cause="ended-from-outside",
    description="the job was cancelled",
    attribution="ended from outside",
    sureness="certain",
)


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    slurm = FakeSlurm(tmp_path / "slurm", [*NODES, "n7"])
    for name in ("n4", "n7"):
        slurm.change_node(name, state="IDLE+DRAIN", reason=NOTE)
    return slurm


def told(root: Path, slurm: FakeSlurm, later_s: float = 60.0) -> Story:
    """Return the story of the job with Slurm's word on it."""
    now_s = STARTED_S + later_s
    story = load(root, "12", now_s=now_s)
    return asked(story, now_s=now_s, environ=slurm.environ(), patience_s=PATIENCE_S)


def test_a_node_that_was_drained_since_is_shown(tmp_path: Path, slurm: FakeSlurm) -> None:
    write_healthy_run(tmp_path)
    slurm.run_job(12, NODES, state="COMPLETED")

    (node,) = told(tmp_path, slurm).out_of_use

    assert (node.node, node.state) == ("n4", "idle+drain")
    assert f"{NOTE} [root@" in node.reason


def test_slurm_is_not_asked_about_an_old_job(tmp_path: Path, slurm: FakeSlurm) -> None:
    write_healthy_run(tmp_path / "old")
    assert told(tmp_path / "old", slurm, 8 * DAY_S).out_of_use == ()
    assert slurm.calls("scontrol") == []

    write_healthy_run(tmp_path / "other", cluster="east")
    assert told(tmp_path / "other", slurm).out_of_use == ()


def test_a_story_stays_as_it_is_if_slurm_does_not_answer(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.set(refuse={"job": "Unable to contact slurm controller", "node": "the same"})
    write_started_script(tmp_path)

    assert told(tmp_path, slurm) == load(tmp_path, "12", now_s=STARTED_S + 60)


LOOK = "what ended it may stand at the end of the job's output"


@rows
def test_a_job_whose_end_nothing_recorded_has_ended_if_slurm_says_so(
    tmp_path: Path, slurm: FakeSlurm, state: str, outcome: str, headline: str
) -> None:
    write_started_script(tmp_path, script="train.sh")
    if state:
        slurm.run_job(12, NODES, state=state, ExitCode="0:9")

    summary = summary_of(told(tmp_path, slurm))

    assert summary.outcome == outcome
    assert summary.headline.what.startswith(headline)
    assert (LOOK in summary.next) == (outcome == "ended")


@pytest.mark.parametrize("later_s", [60, 8 * DAY_S])
def test_a_job_that_was_cancelled_while_it_waited_after_its_check_has_ended(
    tmp_path: Path, slurm: FakeSlurm, later_s: float
) -> None:
    run = RunJournal(tmp_path)
    run.start()
    run.judge(NodeVerdict(node="n3", level=Level.FAULTY, reason="lost"))
    run.act("requeue")
    run.finish("requeue")
    stories = []
    for state in ("PENDING", "CANCELLED"):
        slurm.run_job(12, [], state=state)
        stories.append(told(tmp_path, slurm, later_s))

    ends = [story.ended for story in stories]
    assert ends == ["", "Slurm says that the job has ended (cancelled)"]


@pytest.mark.parametrize("state", ["FAILED", ""])
def test_a_check_ends_with_its_job(tmp_path: Path, slurm: FakeSlurm, state: str) -> None:
    run = RunJournal(tmp_path)
    run.start()
    run.begin_round(0, [["n1", "n2"]])
    if state:
        slurm.run_job(12, NODES, state=state, ExitCode="0:9")

    story = told(tmp_path, slurm, 10)

    assert load(tmp_path, "12", now_s=STARTED_S + 10).last.note == "still running: round 0"
    assert story.last.note == "the master stopped before a verdict, in round 0"
    assert story.last.state is State.STOPPED
    assert "the job has ended" in summary_of(story).headline.what


@rows
def test_a_job_whose_next_attempt_is_to_come_waits_as_slurm_says(
    tmp_path: Path, slurm: FakeSlurm, state: str, waits: str
) -> None:
    run = RunJournal(tmp_path)
    run.start()
    run.master(MasterStopped(reason="SIGTERM", job="the job was requeued"))
    slurm.run_job(12, [], state=state, Reason="BeginTime")

    assert told(tmp_path, slurm).waits == waits


@rows
def test_who_cancelled_a_job_is_shown_if_accounts_say_it(
    tmp_path: Path, slurm: FakeSlurm, settings: dict[str, object], who: str
) -> None:
    slurm.set(**{"accounts": {"12": "CANCELLED by 0"}, **settings})
    slurm.run_job(12, ["n1", "n2"], state="CANCELLED")
    run = write_started_script(tmp_path)
    run.write(journal.POST_MORTEM, CANCELLED)

    story = told(tmp_path, slurm)

    by = f" by {who}" if who else ""
    assert story.cancelled_by == who
    assert summary_of(story).headline.what == f"the job was cancelled{by}"


def test_what_killed_a_script_is_asked(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.set(accounting="accounting_storage/slurmdbd", accounts={"12": "CANCELLED by 0"})
    slurm.run_job(12, ["n1", "n2"], state="CANCELLED")
    run = RunJournal(tmp_path)
    run.pass_check()
    run.run_script(signal=15, duration_s=2.8)

    summary = summary_of(told(tmp_path, slurm))

    assert (summary.outcome, summary.headline.what) == ("ended", "the job was cancelled")
    assert summary.done == ("cancelled by root",)


def test_accounts_are_not_asked_if_a_job_ended_by_itself(tmp_path: Path, slurm: FakeSlurm) -> None:
    write_healthy_run(tmp_path)
    slurm.run_job(12, NODES, state="COMPLETED")

    told(tmp_path, slurm)

    assert slurm.calls("sacct") == []
