# SPDX-License-Identifier: Apache-2.0
"""Which step mends a node next: by what its faults are, what was tried, and what is allowed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from slurm_health.node.rules.finding import CheckResult, Remedy, mended_by, node_fault
from slurm_health.node.rules.mending import (
    MendStep,
    StepOutcome,
    Tried,
    burns_in,
    first_step,
    next_step,
    overdue,
    unfinished,
    with_tried,
)
from slurm_health.node.rules.settings import Mend
from slurm_health.node.rules.xid import judge_sxid, judge_xid, remedy_of

ALL = ("reset", "reload", "reboot", "deep_test", "ticket")
NOW_S = 1_000_000.0


def mend(**settings: Any) -> Mend:
    commands = {"reload": ["x"], "deep_test": ["x"], "steps": ALL, "dry_run": False}
    return msgspec.convert({**commands, **settings}, Mend)


def fault(remedy: Remedy | None, name: str = "gpu") -> CheckResult:
    return CheckResult(name=name, finding=mended_by(node_fault("x"), remedy))


def tried(
    step: MendStep,
    ago_s: float = 600.0,
    node: str = "n3",
    drain: str = "d",
    outcome: StepOutcome = StepOutcome.FAILED,
) -> Tried:
    begun_s = NOW_S - ago_s
    return Tried(
        node=node, step=step, time_s=begun_s, drain=drain, outcome=outcome, until_s=begun_s + 1800
    )


def chosen(first: MendStep, *steps: Tried, **settings: Any) -> MendStep | None:
    return next_step(first, steps, "n3", "d", mend(**settings), NOW_S).step


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([fault(Remedy.RESET)], MendStep.RESET),
        ([fault(Remedy.RESET), fault(Remedy.REBOOT, "xid")], MendStep.REBOOT),
        ([fault(None, "disk")], MendStep.TICKET),
        (
            [fault(Remedy.RESET), fault(None, "disk")],
            MendStep.TICKET,
        ),  # a reset must not hide the disk
        ([fault(None, "scratch")], MendStep.REBOOT),  # by the site's word
        ([fault(Remedy.RESET), fault(None, "scratch")], MendStep.REBOOT),
        ([], MendStep.DEEP_TEST),
    ],
)
def test_the_first_step_is_what_all_faults_need(
    faults: list[CheckResult], expected: MendStep
) -> None:
    assert first_step(faults, mend(first={"scratch": "reboot"})) is expected


def test_steps_go_up_the_ladder_and_end_with_a_ticket() -> None:
    steps: list[Tried] = []
    seen = []
    while (step := chosen(MendStep.RESET, *steps, per_hour=9)) is not None:
        seen.append(step)
        steps.append(tried(step, 600.0 - len(steps)))

    assert seen == list(MendStep)


def test_what_the_site_does_not_allow_is_left_out() -> None:
    assert chosen(MendStep.RESET, steps=["reboot", "ticket"]) is MendStep.REBOOT
    assert chosen(MendStep.RESET, tried(MendStep.REBOOT), steps=["reboot"]) is None
    assert chosen(MendStep.TICKET, steps=["reset"]) is None


def test_a_fault_that_comes_back_within_a_day_begins_where_the_last_drain_ended() -> None:
    before = tried(MendStep.RESET, 3 * 3600.0, drain="earlier", outcome=StepOutcome.DONE)

    assert chosen(MendStep.RESET, before) is MendStep.RELOAD
    assert chosen(MendStep.RESET, before, per_day=2) is MendStep.RESET
    assert (
        chosen(MendStep.RESET, tried(MendStep.RESET, 25 * 3600.0, drain="earlier"))
        is MendStep.RESET
    )


def test_nothing_is_begun_while_a_step_is_under_way() -> None:
    assert chosen(MendStep.RESET, tried(MendStep.RESET, outcome=StepOutcome.BEGUN)) is None
    late = tried(MendStep.RESET, 1801.0, outcome=StepOutcome.BEGUN)
    assert chosen(MendStep.RESET, late) is MendStep.RELOAD


def test_all_nodes_share_the_limit_of_an_hour_but_a_ticket_is_always_written() -> None:
    others = [tried(MendStep.REBOOT, node=f"n{number}", drain="x") for number in range(10, 14)]

    assert chosen(MendStep.RESET, *others) is None
    assert chosen(MendStep.RESET, *others[1:]) is MendStep.RESET
    assert chosen(MendStep.TICKET, *others) is MendStep.TICKET
    hours_ago = [msgspec.structs.replace(each, time_s=NOW_S - 3700) for each in others]
    assert chosen(MendStep.RESET, *hours_ago) is MendStep.RESET


def test_a_dry_run_says_it_once_for_each_drain() -> None:
    said = tried(MendStep.RESET, outcome=StepOutcome.DRY_RUN)

    assert chosen(MendStep.RESET, dry_run=True) is MendStep.RESET
    assert chosen(MendStep.RESET, said, dry_run=True) is None
    earlier = msgspec.structs.replace(said, drain="earlier")
    assert chosen(MendStep.RESET, earlier, dry_run=False) is MendStep.RESET  # nothing was done then


def test_how_a_step_has_ended_replaces_that_it_began() -> None:
    begun = tried(MendStep.REBOOT, outcome=StepOutcome.BEGUN)
    ended = msgspec.structs.replace(begun, outcome=StepOutcome.DONE)

    assert with_tried([begun], ended) == (ended,)
    assert unfinished([begun], "n3", "d") == begun
    assert unfinished([ended], "n3", "d") == ended
    assert unfinished([tried(MendStep.REBOOT)], "n3", "d") is None


def test_a_node_that_is_not_back_from_its_reboot_is_overdue() -> None:
    late = tried(MendStep.REBOOT, 1801.0, outcome=StepOutcome.BEGUN)
    in_time = tried(MendStep.REBOOT, 1799.0, outcome=StepOutcome.BEGUN)

    tested = tried(MendStep.DEEP_TEST, 1801.0, outcome=StepOutcome.BEGUN)
    assert overdue([tested], NOW_S) == []
    assert overdue([tested], NOW_S + 3600) == [tested]
    assert overdue(
        [late, in_time, tried(MendStep.RESET, 9999.0, outcome=StepOutcome.BEGUN)], NOW_S
    ) == [late]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (judge_xid(48), Remedy.RESET),
        (judge_xid(79), Remedy.REBOOT),
        (judge_xid(119), Remedy.RESET),
        (
            judge_xid(
                154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
            ),
            Remedy.REBOOT,
        ),
        (judge_sxid(20034, fatal=True), Remedy.RESET),
        (judge_sxid(23001, fatal=True), Remedy.REBOOT),
        ((None, "configured as a fault"), None),
    ],
)
def test_the_first_step_for_an_xid_is_what_nvidias_tables_say(
    said: tuple[object, str], expected: Remedy | None
) -> None:
    assert remedy_of(said[1]) is expected


def test_a_burn_in_that_has_failed_is_not_followed_by_a_short_test_within_a_day() -> None:
    day_s = 24 * 3600.0
    steps = mend(steps=["deep_test", "ticket"])

    def step(ended_s_ago: float) -> MendStep | None:
        burn_in = msgspec.structs.replace(
            tried(MendStep.DEEP_TEST, ago_s=ended_s_ago + day_s, drain="before"),
            until_s=NOW_S - ended_s_ago,
        )
        return next_step(MendStep.DEEP_TEST, [burn_in], "n3", "now", steps, NOW_S).step

    assert step(3600.0) is MendStep.TICKET
    assert step(day_s + 1) is MendStep.DEEP_TEST


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"burn_in_h": 0}, False),
        ({"steps": ["ticket"]}, False),
        ({"enabled": False}, False),
    ],
)
def test_nodes_are_burned_in_where_the_site_has_a_deep_test(
    settings: dict[str, Any], expected: bool
) -> None:
    assert burns_in(mend(**{"enabled": True, **settings})) is expected
