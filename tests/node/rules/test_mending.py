# SPDX-License-Identifier: Apache-2.0
"""Which step mends a node next: by what its faults are, what was tried, and what is allowed."""

from __future__ import annotations

from typing import Any

import msgspec

from slurm_health.node.rules.mending import (
    MendStep,
    StepOutcome,
    Tried,
    next_step,
    overdue,
)
from slurm_health.node.rules.settings import Mend

ALL = ("reset", "reload", "reboot", "deep_test", "ticket")
NOW_S = 1_000_000.0


def mend(**settings: Any) -> Mend:
    commands = {"reload": ["x"], "deep_test": ["x"], "steps": ALL, "dry_run": False}
    return msgspec.convert({**commands, **settings}, Mend)


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


def test_all_nodes_share_the_limit_of_an_hour_but_a_ticket_is_always_written() -> None:
    others = [tried(MendStep.REBOOT, node=f"n{number}", drain="x") for number in range(10, 14)]

    assert chosen(MendStep.RESET, *others) is None
    assert chosen(MendStep.RESET, *others[1:]) is MendStep.RESET
    assert chosen(MendStep.TICKET, *others) is MendStep.TICKET
    hours_ago = [msgspec.structs.replace(each, time_s=NOW_S - 3700) for each in others]
    assert chosen(MendStep.RESET, *hours_ago) is MendStep.RESET


def test_a_node_that_is_not_back_from_its_reboot_is_overdue() -> None:
    late = tried(MendStep.REBOOT, 1801.0, outcome=StepOutcome.BEGUN)
    in_time = tried(MendStep.REBOOT, 1799.0, outcome=StepOutcome.BEGUN)

    tested = tried(MendStep.DEEP_TEST, 1801.0, outcome=StepOutcome.BEGUN)
    assert overdue([tested], NOW_S) == []
    assert overdue([tested], NOW_S + 3600) == [tested]
    assert overdue(
        [late, in_time, tried(MendStep.RESET, 9999.0, outcome=StepOutcome.BEGUN)], NOW_S
    ) == [late]


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
