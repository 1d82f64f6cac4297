# SPDX-License-Identifier: Apache-2.0
"""What is tested again before a health check gives a drained node back."""

from __future__ import annotations

import pytest

from slurm_health.node import state
from tests.node.hooks.test_healthcheck import pass_after_pass
from tests.support.hooked_node import Node
from tests.support.hooked_slurm import HookedSlurm

# What a prolog knows of its job, and a health check does not.
_OF_JOBS = """\
[checks.counts]
check = "command"
argv = ["sh", "-c", 'test -z "${%s:-}" || { echo 7 GPUs, Slurm counts on 8; exit 77; }']
contexts = ["prolog"]
time_limit_s = 30
"""


def test_a_fault_against_what_slurm_expects_is_tested_against_the_same(node: Node) -> None:
    node.more = _OF_JOBS % "SLURM_JOB_GPUS"
    assert node.prolog(SLURM_JOB_GPUS="0,1,2,3,4,5,6,7")
    pass_after_pass(node, 9)
    assert node.state == "IDLE+DRAIN"
    assert "7 GPUs, Slurm counts on 8" in node.said


@pytest.mark.slow
def test_a_fault_that_no_retest_shows_is_left_to_a_person_in_the_end(node: Node) -> None:
    node.more = _OF_JOBS % "SLURM_JOB_ID"
    for job in range(3):
        assert node.prolog(job=70 + job)
        pass_after_pass(node, 3)
        assert node.state == "IDLE"
    assert node.prolog(job=73)
    assert "(drain 4 within a day: an administrator has to release it)" in node.said
    pass_after_pass(node, 30, apart_s=3600)
    assert node.state == "IDLE+DRAIN"


@pytest.mark.slow
def test_drains_of_days_ago_do_not_count(node: Node) -> None:
    for _ in range(5):
        node.break_it()
        assert node.healthcheck()
        node.mend()
        pass_after_pass(node, 3)
        assert node.state == "IDLE"
        node.now_s += 24 * 3600


def _exclusive(node: Node) -> None:
    """A test that would disturb other jobs: it leaves a trace where it runs."""
    argv = f'["touch", "{node.directory}/ran"]'
    node.more = (
        f"[checks.burn]\ncheck='command'\nexclusive=true\ncontexts=['retest']\nargv={argv}\n"
    )


@pytest.mark.parametrize(("shown", "runs"), [("MIXED+DRAIN", False), ("IDLE+DRAIN", True)])
def test_an_exclusive_test_runs_on_an_idle_node_only(
    drained: Node, slurm: HookedSlurm, shown: str, runs: bool
) -> None:
    import msgspec

    _exclusive(drained)
    kept = state.load_record(drained.site.state)
    assert kept is not None
    state.save_record(drained.site.state, msgspec.structs.replace(kept, retest=("burn",)))
    slurm.set({"n3": (shown, drained.reason)})
    pass_after_pass(drained, 1)
    assert (drained.directory / "ran").exists() is runs
    assert ("it needs an idle node, and this one is MIXED+DRAIN" in drained.said) is not runs


def test_two_tests_that_each_need_the_node_alone_do_not_run_side_by_side(
    drained: Node, slurm: HookedSlurm
) -> None:
    import msgspec

    busy, met = drained.directory / "busy", drained.directory / "met"
    text = f"mkdir {busy} || touch {met}; sleep 0.3; rmdir {busy}; echo >>{drained.directory}/ran"
    for name in ("burn", "bench"):
        drained.more += f"[checks.{name}]\ncheck='command'\nexclusive=true\n"
        drained.more += f"contexts=['retest']\nargv=['sh', '-c', '{text}']\n"
    kept = state.load_record(drained.site.state)
    assert kept is not None
    again = msgspec.structs.replace(kept, retest=("burn", "bench"))
    state.save_record(drained.site.state, again)
    slurm.set({"n3": ("IDLE+DRAIN", drained.reason)})
    pass_after_pass(drained, 1)
    assert (drained.directory / "ran").read_text() == "\n\n"
    assert not met.exists()
