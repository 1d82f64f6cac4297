# SPDX-License-Identifier: Apache-2.0
"""`slurm-health plan` shows a run step by step, and says what it cannot read."""

from __future__ import annotations

from click.testing import CliRunner, Result

from slurm_health.cli.plan import plan
from slurm_health.records.errors import UsageError
from tests.cases import cases


def call(*arguments: str) -> Result:
    return CliRunner().invoke(plan, arguments)


def output(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_faults_are_found_and_explained_and_without_any_one_round_is_enough() -> None:
    text = output("n[1-8]", "--bad", "n3,n7:slow=1.3")
    assert "n3 faulty: no allgather with n" in text
    assert "n7 slow: allgather slow with n" in text
    assert "healthy: n[1-2,4-6,8] (6 nodes)" in text
    shared = output("n[1-16]", "--bad", "n[2-3]:compute=2,n5:flaky=1")
    assert [line.split()[:2] for line in shared.splitlines() if " (probability" in line] == [
        ["n5", "faulty:"],
        ["n2", "slow:"],
        ["n3", "slow:"],
    ]
    assert "verdict after 1 round:" in output("n[1-8]")


def test_the_same_seed_is_the_same_run() -> None:
    first, again = (output("n[1-6]", "--bad", "n3:flaky=0.5", "--seed", "3") for _ in range(2))
    assert first == again
    assert first != output("n[1-6]", "--bad", "n3:flaky=0.5", "--seed", "4")


@cases("cli/plan.toml")
def test_what_cannot_be_served_is_said(arguments: list[str], problem: str) -> None:
    result = call(*arguments)
    assert isinstance(result.exception, UsageError)
    assert problem in str(result.exception)
