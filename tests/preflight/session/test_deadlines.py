# SPDX-License-Identifier: Apache-2.0
"""How long nodes and rounds may take."""

import msgspec
import pytest

from slurm_health.preflight.session.controller import Wait
from slurm_health.preflight.session.phases import phases
from slurm_health.records.records import (
    AgentsLaunched,
    GroupAborted,
    NodesAdmitted,
    RoundEnded,
    RoundStarted,
    WorkersStarting,
)
from slurm_health.records.verdict import Outcome
from tests.support.session_story import LIMITS, NODES, START_S, Story, measured, ready, started

BLIND_S = LIMITS.round_deadline_s / 2  # these nodes load torch within a second


def test_a_group_that_says_nothing_is_stopped_at_the_deadline_and_then_waited_for_briefly() -> None:
    story = Story()
    story.is_in_round()
    story.waits(START_S + BLIND_S - 0.1)

    step = story.next(START_S + BLIND_S)  # all groups are stopped with one write
    assert isinstance(step, tuple)
    stopped = [record for record in step if isinstance(record, GroupAborted)]
    assert [record.group for record in stopped if record.timed_out] == [["n1", "n2"], ["n3", "n4"]]
    story.says(*step)

    waiting = story.next()
    give_up_s = START_S + BLIND_S + LIMITS.abort_grace_s
    assert waiting == Wait(until_s=give_up_s, reason="round 0: 0 of 2 groups done")
    ended = story.does(RoundEnded, at_s=give_up_s)
    assert ended == RoundEnded(round=0, silent=list(NODES))


def test_a_thorough_round_of_gpus_may_take_as_long_as_what_it_does() -> None:
    story = Story(course=phases(["thorough"]))
    story.begins(backend="nccl", devices=["H100"] * 8)

    begun = story.does(RoundStarted)

    burn_s = 3 + 8
    assert begun.deadline_s == BLIND_S + LIMITS.patience * burn_s
    story.waits(START_S + begun.deadline_s - 0.1)
    story.does(GroupAborted, at_s=START_S + begun.deadline_s)


@pytest.mark.parametrize(("options", "times"), [({}, 1.0), ({"apart": 1.0}, LIMITS.patience)])
def test_devices_that_connect_apart_get_more_time_than_others_that_reported(
    options: dict[str, float], times: float
) -> None:
    story = Story()
    story.is_in_round()
    current = story.controller.state.round
    assert current is not None
    story.says(msgspec.structs.replace(current.record, options=options))
    story.says(*measured("n1", "n2", took_ms=1000.0), at_s=START_S + 1.0)

    waiting = story.waits()

    allowed_s = LIMITS.adaptive_factor * 1.0 + LIMITS.least_margin_s
    assert waiting.until_s == START_S + times * allowed_s


@pytest.mark.parametrize(
    ("start_ms", "margin_s", "blind_s"),
    [(1e3, 2.0, 30.0), (4e3, 4.0, 50.0), (2e4, 6.0, 60.0), (2e5, 6.0, 60.0)],
)
def test_machines_that_loaded_torch_quickly_get_shorter_deadlines(
    start_ms: float, margin_s: float, blind_s: float
) -> None:
    story = Story()
    story.begins(start_ms=start_ms)

    begun = story.does(RoundStarted)

    assert begun.deadline_s == blind_s
    story.says(*measured("n1", "n2", took_ms=1000.0), at_s=START_S + 1.0)
    waiting = story.waits()

    assert waiting.until_s == START_S + LIMITS.adaptive_factor * 1.0 + margin_s


def test_a_node_that_did_not_come_back_in_time_is_not_waited_for_again() -> None:
    story = Story()
    story.is_in_round()
    story.says(WorkersStarting(node="n4", launch=0), *measured(*NODES))
    story.does(RoundEnded)
    waiting = story.waits()

    begun = story.does(RoundStarted, at_s=waiting.until_s)

    assert begun.absent == ["n4"]
    story.says(*measured(*NODES[:3], index=1))
    story.does(RoundEnded)

    again = story.does(RoundStarted)

    assert again.absent == ["n4"]


def test_a_node_that_came_back_and_starts_anew_is_waited_for_as_long_as_the_first_time() -> None:
    story = Story()
    story.is_in_round()
    story.says(WorkersStarting(node="n4", launch=0), *measured(*NODES))
    story.does(RoundEnded)
    first = story.waits()

    story.says(ready("n4"), at_s=first.until_s - 1.0)
    story.does(RoundStarted)
    story.says(WorkersStarting(node="n4", launch=0), *measured(*NODES, index=1))
    story.does(RoundEnded)

    second = story.waits()

    assert second.until_s - story.now_s == first.until_s - START_S


@pytest.mark.parametrize("late", [False, True])
def test_a_round_in_which_nobody_has_reported_yet_gets_more_patience_but_after_a_late_one(
    late: bool,
) -> None:
    story = Story()
    story.is_in_round()
    story.says(*measured(*(NODES[:2] if late else NODES), took_ms=1000.0))
    if late:
        story.does(GroupAborted, at_s=START_S + BLIND_S)
        how = {"outcome": Outcome.TIMED_OUT, "elapsed_ms": BLIND_S * 1e3}
        story.says(*(msgspec.structs.replace(each, **how) for each in measured(*NODES[2:])))
    story.does(RoundEnded)
    story.does(RoundStarted)

    waiting = story.waits()

    usual_s = LIMITS.adaptive_factor * 1.0 + LIMITS.least_margin_s
    assert waiting.until_s == story.now_s + usual_s * (1.0 if late else LIMITS.patience)


def test_no_node_is_given_up_while_others_still_get_ready() -> None:
    """So it is where agents start one after the other, and each loads torch within a second."""
    story = Story()
    story.does(AgentsLaunched)
    story.now_s += LIMITS.ready_extra_s + 15.0
    story.is_ready("n1", "n2", "n3")
    story.says(started("n4"))

    step = story.controller.next_step(story.now_s)
    assert step == Wait(until_s=story.now_s + LIMITS.next_ready_s, reason="1 nodes to get ready")

    story.does(NodesAdmitted, at_s=story.now_s + LIMITS.next_ready_s)
