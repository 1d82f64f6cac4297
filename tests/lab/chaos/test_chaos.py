# SPDX-License-Identifier: Apache-2.0
"""Chaos in small, what a seed comes to, and that nothing wrong passes for right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from slurm_health.records.errors import ExitCode
from slurm_health.records.records import Disposition, JobOutcome
from slurm_health.records.verdict import Level
from tests.lab import directory
from tests.support.supervised import eventually

from .command import run_many
from .judge import violations
from .look import Check, Seen, Start, starts_in
from .plan import DIES, NODES, ON_A_NODE, SUBMITTED, Deed, Plan, Trouble, plan_of

MANY = [plan_of(seed) for seed in range(500)]
# A master is killed; a job is requeued meanwhile; ranks are killed, of a job with a spare; a job is
# cancelled as its check begins, and as it moves; slurmctld is killed when there is a verdict.
SHORT = (816, 372, *(pytest.param(n, marks=pytest.mark.slow) for n in (218, 847, 577, 2928)))


@pytest.mark.heavy
@pytest.mark.lab
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SHORT)
def test_a_run_of_chaos_violates_nothing(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    well = run_many([seed], labs=1, evidence=tmp_path, minutes=5)
    assert well, capsys.readouterr().out


@pytest.mark.lab
def test_interrupted_it_sums_up_and_leaves_no_lab(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.lab", "chaos", f"--evidence={tmp_path}", "--labs=2"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as chaos:
        own = f"t{chaos.pid}-"
        eventually(lambda: any(name.startswith(own) for name in directory.living()), "a lab")
        chaos.send_signal(signal.SIGINT)
        out, err = chaos.communicate(timeout=30)
    assert (chaos.returncode, err) == (130, "lab: interrupted\n")
    assert out.startswith("0 runs, 0 with violations\n")
    eventually(lambda: not any(name.startswith(own) for name in directory.living()), "no lab")
    assert [*tmp_path.iterdir()] == []


# --- plans -------------------------------------------------------------------------------------


def test_everything_that_can_happen_happens_and_a_seed_always_comes_to_the_same_plan() -> None:
    assert [plan_of(seed) for seed in range(50)] == MANY[:50]
    assert {trouble.deed for plan in MANY for trouble in plan.troubles} == set(Deed)
    assert {plan.user for plan in MANY} == {"alice", "root"}
    assert any(plan.spares for plan in MANY)
    assert any(plan.hidden for plan in MANY)
    assert any(plan.flagged for plan in MANY)
    assert {plan.preempt_mode for plan in MANY} == {"", "CANCEL", "REQUEUE"}
    assert {plan.grace_s > 0 for plan in MANY if plan.preempt_mode} == {True, False}


def test_every_plan_can_be_carried_out() -> None:
    for plan in MANY:
        assert 2 <= plan.least <= plan.nodes <= plan.nodes + plan.spares <= len(NODES)
        assert plan.hidden <= {*plan.played}
        assert all((trouble.deed in ON_A_NODE) == bool(trouble.node) for trouble in plan.troubles)


# --- the judge ---------------------------------------------------------------------------------

PLAN = replace(
    plan_of(0), user="alice", nodes=2, least=2, spares=0, played={"n3": DIES},
    hidden=frozenset(), flagged=frozenset(), troubles=(), restarts=1,
)  # fmt: skip
DONE = JobOutcome(disposition=Disposition.PROCEED, exit_code=ExitCode.HEALTHY, reason="")
WELL = Check(attempt=0, levels={"n1": Level.HEALTHY, "n2": Level.HEALTHY}, finished=DONE)
LEFT = replace(WELL, finished=msgspec.structs.replace(DONE, disposition=Disposition.REQUEUE))
START = Start(attempt=0, nodes=("n1", "n2"), count=2, tasks=("n2", "n1"), ended=True)
RIGHT = Seen(
    done=(), job={"JobState": "COMPLETED"}, output="", starts=(START,), checks=(WELL,), drained={}
)


def killed(deed: Deed, node: str = "") -> tuple[Trouble, ...]:
    return (Trouble(deed=deed, event=SUBMITTED, node=node),)


def job(**fields: str) -> Mapping[str, str]:
    return fields


NO_STEP = replace(
    RIGHT, job=job(JobState="FAILED"), starts=(replace(START, tasks=(), ended=False),),
    output="srun: error: Unable to create step for job 1: Job/step already completing or completed",
)  # fmt: skip


@pytest.mark.parametrize(
    "seen",
    [
        RIGHT,
        replace(RIGHT, job=job(JobState="CANCELLED"), starts=(), done=killed(Deed.CANCEL)),
        replace(RIGHT, job=job(JobState="TIMEOUT"), starts=(), done=killed(Deed.TIME_LIMIT)),
        replace(NO_STEP, done=killed(Deed.TIME_LIMIT)),
        replace(RIGHT, job=job(JobState="PREEMPTED"), starts=(), done=killed(Deed.PREEMPT)),
        replace(RIGHT, starts=(START, replace(START, attempt=1)), done=killed(Deed.PREEMPT),
                checks=(WELL, replace(WELL, attempt=1))),
        replace(RIGHT, accused={"n1": "suspect"}, done=killed(Deed.KILL_AGENT, "n1")),
        replace(RIGHT, job=job(JobState="PENDING", Comment="slurm-health: held"), starts=()),
        replace(RIGHT, job=job(JobState="FAILED"), starts=(), output="the job stops: n1"),
        replace(RIGHT, job=job(JobState="FAILED"), starts=(), done=killed(Deed.KILL_SLURMCTLD),
                output="*** JOB 1 ON n1 CANCELLED AT 2026-11-22T11:12:30 DUE TO JOB REQUEUE ***"),
        replace(RIGHT, job=job(JobState="FAILED"), starts=(),
                done=killed(Deed.KILL_SLURMCTLD) + killed(Deed.TIME_LIMIT),
                output="*** JOB 1 ON n1 CANCELLED AT 2026-11-22T11:12:30 DUE TO TIME LIMIT ***"),
        replace(RIGHT, drained={"n1": "Not responding"}, done=killed(Deed.KILL_SLURMD, "n1")),
        replace(RIGHT, starts=(START, replace(START, attempt=1)), done=killed(Deed.REQUEUE),
                checks=(WELL, replace(WELL, attempt=1))),
        replace(RIGHT, starts=(replace(START, ended=False), replace(START, restart=1))),
        replace(RIGHT, starts=(START, replace(START, attempt=1)),  # its check found no way to go on
                checks=(WELL, LEFT, replace(WELL, attempt=1))),
        replace(RIGHT, checks=(WELL, replace(WELL, levels={}, finished=None))),
        replace(RIGHT, starts=(replace(START, ended=False), replace(START, restart=1)),
                checks=(replace(WELL, levels={}, finished=None), WELL, WELL)),  # its master died
        replace(RIGHT, checks=(), output="the job runs UNCHECKED"),
        replace(RIGHT, starts=(START, replace(START, attempt=1, beside=("batch",))),
                done=killed(Deed.LOSE_NODE, "n1"), checks=(WELL, replace(WELL, attempt=1))),
        replace(RIGHT, starts=(replace(START, tasks=()),), done=killed(Deed.KILL_SUPERVISOR)),
    ],
)  # fmt: skip
def test_what_is_right_is_no_violation(seen: Seen) -> None:
    assert violations(PLAN, seen) == []


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (replace(RIGHT, drained={"n1": "slurm-health: x"}), "n1 is well and was drained"),
        (replace(RIGHT, left=("n1: srun",)), "left running: n1: srun"),
        (replace(RIGHT, starts=()), "its script did not run"),
        (replace(RIGHT, starts=(START, START)), "more than once in one start"),
        (replace(RIGHT, starts=(START, replace(START, restart=2))), "again more often than 1"),
        (replace(RIGHT, starts=(replace(START, beside=("batch",)),)), "ran beside another"),
        (replace(RIGHT, starts=(START, replace(START, attempt=1))), "nobody asked for it"),
        (replace(RIGHT, starts=(START, replace(START, attempt=1)),
                 checks=(WELL, replace(LEFT, attempt=1))), "nobody asked for it"),
        (replace(RIGHT, checks=()), "nothing says so"),
        (replace(RIGHT, starts=(replace(START, nodes=("n1",), count=1),)), "were asked for"),
        (replace(RIGHT, starts=(replace(START, tasks=("n1",)),)), "its tasks ran on"),
        (replace(RIGHT, job=job(JobState="CANCELLED")), "nothing explains"),
        (replace(RIGHT, job=job(JobState="TIMEOUT"), done=killed(Deed.CANCEL)), "nothing explains"),
        (replace(RIGHT, accused={"n1": "suspect"}, done=killed(Deed.CANCEL)),
         "n1 is well, and history calls it suspect"),
        (replace(RIGHT, job=job(JobState="PENDING", Reason="JobHeldUser")), "nothing explains"),
        (replace(RIGHT, job=job(JobState="PENDING", Priority="0", Reason="JobHeldUser"),
                 done=killed(Deed.PREEMPT)), "nothing explains"),
        (replace(RIGHT, unsettled="RUNNING"), "does not settle"),
        (replace(RIGHT, output="Traceback (most recent call last)"), "has a traceback"),
        (replace(RIGHT, report_problem="report ends with 70"), "report ends with 70"),
        (replace(RIGHT, checks=(replace(WELL, problem="replayed"),)), "the journal of attempt 0"),
        (replace(RIGHT, checks=(replace(WELL, drained_twice=("n1",)),)), "drained twice"),
        (replace(RIGHT, checks=(replace(WELL, levels={"n1": Level.SLOW}),)), "was found slow"),
        (replace(RIGHT, checks=(replace(WELL, levels={"n3": Level.HEALTHY}),),
                 starts=(replace(START, nodes=("n1", "n3"), tasks=("n1", "n3")),)),
         "n3 dies and was found healthy"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_violation(seen: Seen, said: str) -> None:
    assert said in " / ".join(violations(PLAN, seen))


NO_REQUEUE = replace(PLAN, options=("--no-requeue",), flagged=frozenset({"n2"}))
OVER_PROLOG = replace(
    RIGHT, job=job(JobState="CANCELLED"), drained={"n2": "Prolog error"},
    starts=(replace(START, tasks=()),),
)  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "seen", "is_right"),
    [
        (replace(PLAN, grace_s=5), replace(NO_STEP, done=killed(Deed.PREEMPT)), True),
        (replace(PLAN, grace_s=0), replace(NO_STEP, done=killed(Deed.PREEMPT)), False),
        (NO_REQUEUE, OVER_PROLOG, True),
    ],
)
def test_a_script_may_have_no_step_after_its_grace_or_a_failed_prolog(
    plan: Plan, seen: Seen, is_right: bool
) -> None:
    assert (violations(plan, seen) == []) == is_right


def test_what_the_script_writes_of_itself_is_read_by_start() -> None:
    ran = "start 0 n[1-2] 2 0\ntask 0 n2\ntask 0 n1\nend 0\noverlap 1 batch\nstart 1 n4 1 2\n"
    first, second = starts_in(ran)
    assert first == START
    assert (second.attempt, second.nodes, second.ended) == (1, ("n4",), False)
    assert (second.restart, second.beside) == (2, ("batch",))
