# SPDX-License-Identifier: Apache-2.0
"""`slurm-health report --follow` on a terminal of its own."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from slurm_health.records.script_records import ScriptEnded, ScriptStarted
from slurm_health.system import journal
from tests.cli.terminal import Terminal, terminal
from tests.support.command_line import slurm_health
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import Clock, RunJournal, write_healthy_run
from tests.support.rows import rows
from tests.support.supervised import eventually


def begun(root: Path, ago_s: float = 0.0) -> RunJournal:
    return RunJournal(root, nodes=["n1", "n2"], clock=Clock(time.time() - ago_s))


def following(
    root: Path,
    job: str = "12",
    kind: str = "xterm",
    slurm: Mapping[str, str] | None = None,
) -> AbstractContextManager[Terminal]:
    environ = {**(slurm or {}), "TERM": kind, "COLUMNS": "100", "LINES": "30"}
    return terminal("report", "--follow", "--journal", str(root), job, environ=environ)


def test_a_check_is_followed_and_its_report_is_left_on_the_terminal(tmp_path: Path) -> None:
    run = begun(tmp_path)
    with following(tmp_path) as shown:
        run.start()
        shown.read_until("2 of 2 nodes ready")
        run.begin_round(0, [["n1", "n2"]])
        run.measure(0, ["n1", "n2"])
        shown.read_until("pairs done")
        run.end_round(0)
        run.judge()
        run.finish("proceed")
        run.run_script()
        drawn = shown.read_to_the_end(0)
    left = drawn.rpartition("Ctrl-C ends this")[2]
    assert "train.sh finished after 41 s" in left
    assert "n[1-2]" in left


def test_where_slurm_cannot_be_asked_it_waits_for_a_journal_and_says_so(tmp_path: Path) -> None:
    with following(tmp_path, slurm={"PATH": "/nonexistent"}) as shown:
        shown.read_until("no journal of it yet, and Slurm cannot be asked")
        run = begun(tmp_path)
        run.start()
        shown.read_until("nodes ready")
        shown.interrupt()


def test_ctrl_c_ends_it_quietly_before_the_job(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.start()
    with following(tmp_path) as shown:
        shown.read_until("nodes ready")
        shown.interrupt()
        shown.read_to_the_end(130)
    assert shown.drawn.rstrip().endswith("\x1b[?25h\x1b[?1049l")


def test_without_a_terminal_it_names_the_report(tmp_path: Path) -> None:
    write_healthy_run(tmp_path)
    ran = slurm_health("report", "--follow", "--journal", str(tmp_path), "12")
    assert ran.code == 2
    assert "slurm-health report 12 prints what is known now" in ran.stderr


@pytest.mark.timeout(180)
def test_a_job_that_was_requeued_is_followed_to_its_next_attempt(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", ["n1", "n2"])
    slurm.run_job(12, [], state="PENDING", Reason="BeginTime")
    clock = Clock(time.time() - 60)
    write_healthy_run(tmp_path / "journal", nodes=["n1", "n2"], clock=clock)
    with following(tmp_path / "journal", slurm=slurm.environ()) as shown:
        shown.read_until("the job is pending again (BeginTime): train.sh finished")
        slurm.change_job(12, state="RUNNING", nodes=["n1", "n2"])  # nothing of it is written yet
        asked = len(slurm.calls("scontrol"))
        eventually(lambda: len(slurm.calls("scontrol")) > asked + 3, "Slurm is asked again")
        assert shown.process.poll() is None
        clock = Clock(time.time())
        RunJournal(tmp_path / "journal", label="1", nodes=["n1", "n2"], clock=clock).start()
        shown.read_until("nodes ready")
        shown.interrupt()


@pytest.mark.timeout(180)
def test_a_script_that_failed_is_followed_to_its_next_start(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", ["n1", "n2"])
    slurm.run_job(12, ["n1", "n2"])
    run = begun(tmp_path / "journal", ago_s=60)
    run.pass_check()
    run.run_script(exit_code=1, duration_s=5)
    with following(tmp_path / "journal", slurm=slurm.environ()) as shown:
        shown.read_until("the job itself still runs")
        shown.read_until("the cause is being looked for")
        again = ScriptStarted(script="train.sh", pid=2, restart=1)
        run.write(journal.SUPERVISOR, again, after_s=5)
        shown.read_until("running for")
        slurm.change_job(12, state="FAILED")
        run.write(journal.SUPERVISOR, ScriptEnded(exit_code=3, signal=0, duration_s=9), after_s=9)
        drawn = shown.read_to_the_end(0)
    assert "train.sh exited with code 3 after 9.0 s" in drawn.rpartition("Ctrl-C ends this")[2]


@rows
def test_what_cannot_be_followed_or_drawn_is_not_waited_for(
    tmp_path: Path, what: str, kind: str, code: int, said: str
) -> None:
    root = tmp_path / "journal"
    if what == "a check":
        begun(root).start()
    elif what == "an array":
        RunJournal(root, job=14, nodes=["n1", "n2"]).start(array="12_3")
    slurm = FakeSlurm(tmp_path / "slurm").environ()
    with following(root, kind=kind, slurm=slurm) as shown:
        drawn = shown.read_to_the_end(code)
    assert said in " ".join(drawn.split())
