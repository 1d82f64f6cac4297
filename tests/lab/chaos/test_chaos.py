# SPDX-License-Identifier: Apache-2.0
"""Chaos in small, what a seed comes to, and that nothing wrong passes for right."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from slurm_health.records.records import Disposition, JobOutcome
from slurm_health.records.verdict import Level
from tests.lab import directory
from tests.support.rows import rows
from tests.support.supervised import eventually

from .command import run_many
from .judge import violations
from .look import Check, Seen, Start, starts_in
from .plan import DIES, NODES, ON_A_NODE, SUBMITTED, Deed, Trouble, plan_of

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
DONE = JobOutcome(disposition=Disposition.PROCEED)


@dataclass(frozen=True, kw_only=True)
class Began(Start):
    attempt: int = 0
    nodes: tuple[str, ...] = ("n1", "n2")
    count: int = 2
    tasks: tuple[str, ...] = ("n2", "n1")
    ended: bool = True


@dataclass(frozen=True, kw_only=True)
class Checked(Check):
    attempt: int = 0
    levels: Mapping[str, Level] = field(
        default_factory=lambda: dict.fromkeys(("n1", "n2"), Level.HEALTHY)
    )
    finished: JobOutcome | None = DONE


@dataclass(frozen=True, kw_only=True)
class Did(Trouble):
    event: str = SUBMITTED


@dataclass(frozen=True, kw_only=True)
class Right(Seen):
    """A run as it is to be, but for what a row says."""

    done: tuple[Did, ...] = ()
    job: Mapping[str, str] = field(default_factory=lambda: {"JobState": "COMPLETED"})
    output: str = ""
    starts: tuple[Began, ...] = (Began(),)
    checks: tuple[Checked, ...] = (Checked(),)
    drained: Mapping[str, str] = field(default_factory=dict)


@rows
def test_what_is_right_is_no_violation(seen: Right, grace_s: int, options: tuple[str, ...]) -> None:
    flagged = frozenset({"n2"} if options else ())
    assert violations(replace(PLAN, grace_s=grace_s, options=options, flagged=flagged), seen) == []


@rows
def test_what_is_wrong_is_a_violation(seen: Right, said: str) -> None:
    assert said in " / ".join(violations(replace(PLAN, grace_s=0), seen))


def test_what_the_script_writes_of_itself_is_read_by_start() -> None:
    ran = "start 0 n[1-2] 2 0\ntask 0 n2\ntask 0 n1\nend 0\noverlap 1 batch\nstart 1 n4 1 2\n"
    first, second = starts_in(ran)
    assert first == Start(attempt=0, nodes=("n1", "n2"), count=2, tasks=("n2", "n1"), ended=True)
    assert (second.attempt, second.nodes, second.ended) == (1, ("n4",), False)
    assert (second.restart, second.beside) == (2, ("batch",))
