# SPDX-License-Identifier: Apache-2.0
"""Which events are told, when, and how many in one message."""

from __future__ import annotations

import msgspec
import pytest

from slurm_health.node.rules.notices import EventKind, NodeEvent, Post, accept, due, lease, settle
from slurm_health.node.rules.settings import Notify, Target

OPS = Target(command=("/bin/cat",))
SETTINGS = Notify(fold_s=30, per_hour=3, targets={"ops": OPS})


def event(
    node: str, kind: EventKind = EventKind.DRAINED, check: str = "gpu", n: int = 0
) -> NodeEvent:
    return NodeEvent(
        id=f"{node}-{kind}-{check}-{n}", kind=kind, node=node, time_s=1.0, text="x", checks=(check,)
    )


def posted(*events: NodeEvent, now_s: float = 100.0, settings: Notify = SETTINGS) -> Post:
    return accept(Post(), events, settings, now_s)


def sent(post: Post, now_s: float, why_not: str = "") -> Post:
    found = due(post, SETTINGS, now_s)
    return settle(post, [(each, why_not) for each in found.batches], SETTINGS, now_s)[0]


def test_a_rack_that_fails_is_one_message_after_a_short_wait() -> None:
    post = posted(*(event(f"n{i}") for i in range(1, 41)))

    early = due(post, SETTINGS, 110.0)
    assert (early.batches, early.wait_s) == ((), 20.0)
    (batch,) = due(post, SETTINGS, 130.0).batches
    assert batch.nodes == "n[1-40]"


def test_other_causes_and_other_kinds_are_messages_of_their_own() -> None:
    post = posted(event("n1"), event("n2", check="fs"), event("n3", EventKind.RELEASED))
    batches = due(post, SETTINGS, 130.0).batches

    assert [each.nodes for each in batches] == ["n1", "n2", "n3"]


def test_what_was_said_of_a_node_last_is_not_said_again() -> None:
    post = accept(posted(event("n1")), [event("n1", n=1)], SETTINGS, 200.0)

    assert len(post.waiting) == 1
    later = accept(post, [event("n1", n=2)], SETTINGS, 200.0 + 60 * 31)
    assert len(later.waiting) == 2


def test_a_node_that_comes_back_and_goes_again_is_told_each_time() -> None:
    kinds = [EventKind.DRAINED, EventKind.RELEASED] * 3
    post = posted(*(event("n1", kind, n=number) for number, kind in enumerate(kinds)))

    assert [each.event.kind for each in post.waiting] == kinds


def test_the_same_event_that_arrives_twice_is_one() -> None:
    both = [event("n1"), event("n2"), event("n1")]

    assert len(posted(*both).waiting) == 2


def test_beyond_the_limit_of_an_hour_events_wait_and_are_folded() -> None:
    post = Post()
    for number in range(3):
        post = accept(post, [event(f"n{number}", check=f"c{number}")], SETTINGS, 100.0 * number)
        post = sent(post, 100.0 * number + 30)
    late = [event(f"m{i}", check=f"c{i}") for i in range(9)]
    post = accept(post, late, SETTINGS, 300.0)

    assert due(post, SETTINGS, 400.0).batches == ()
    assert due(post, SETTINGS, 400.0).wait_s == 30.0 + 3600.0 - 400.0
    (batch,) = due(post, SETTINGS, 3631.0).batches  # of nine causes one message
    assert batch.nodes == "m[0-8]"


def test_a_target_that_fails_is_tried_again_and_given_up_after_days() -> None:
    post = sent(posted(event("n1")), 130.0, "refused")

    assert post.failures["ops"].why == "refused"
    assert due(post, SETTINGS, 150.0).wait_s == 40.0
    post = sent(post, 190.0, "refused")
    assert due(post, SETTINGS, 200.0).wait_s == 110.0
    again = sent(post, 310.0)
    assert again.waiting == ()
    assert again.failures == {}
    found = due(post, SETTINGS, 310.0 + 49 * 3600)
    after, lost = settle(post, [(found.batches[0], "refused")], SETTINGS, 310.0 + 49 * 3600)
    assert (after.waiting, [each.node for each in lost]) == ((), ["n1"])


def test_a_target_that_takes_a_message_gets_it_once_though_another_does_not() -> None:
    two = msgspec.structs.replace(SETTINGS, targets={"ops": OPS, "chat": OPS})
    post = posted(event("n1"), settings=two)
    first, second = due(post, two, 130.0).batches
    post, _ = settle(post, [(first, ""), (second, "refused")], two, 130.0)

    (batch,) = due(post, two, 200.0).batches
    assert batch.target == "chat"


def test_while_one_delivers_others_wait_and_take_over_when_it_has_died() -> None:
    post = lease(posted(event("n1")), "n7", 160.0)

    assert due(post, SETTINGS, 130.0).wait_s == 30.0
    assert due(post, SETTINGS, 161.0).batches


def test_a_clock_that_was_set_back_holds_nothing_up() -> None:
    assert due(posted(event("n1"), now_s=1e9), SETTINGS, 100.0).batches


@pytest.mark.parametrize(("wanted", "count"), [((), 1), (("drained",), 1), (("ticket",), 0)])
def test_a_target_is_told_of_what_it_is_for(wanted: tuple[str, ...], count: int) -> None:
    target = msgspec.convert({"command": ["/bin/cat"], "events": list(wanted)}, Target)
    only = msgspec.structs.replace(SETTINGS, targets={"ops": target})

    assert len(posted(event("n1"), settings=only).waiting) == count
