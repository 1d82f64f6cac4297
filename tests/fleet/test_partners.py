# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_health.fleet.partners import groups, meetings

NEVER = 0.0


def nodes(count: int, checked_s: float = NEVER) -> dict[str, float]:
    return {f"n{number:02}": checked_s for number in range(count)}


def test_what_was_checked_lately_is_no_reason_for_a_check() -> None:
    assert groups(nodes(20, 150.0), {}, due=set(), size=4, room=20) == []


def test_a_node_whose_check_was_cut_short_is_due_and_waits_behind_the_others() -> None:
    idle = {**nodes(3), "cut": 150.0, "done": 140.0}

    found = groups(idle, {}, due={*nodes(3), "cut"}, size=3, room=6)

    assert found == [("n00", "n01", "n02")]
    assert groups({"cut": 150.0, "done": 140.0, "n": 145.0}, {}, due={"cut"}, size=3, room=6)


def test_nodes_that_have_never_met_are_put_together() -> None:
    met = meetings([["n00", "n01", "n02"], ["n03", "n04", "n05"]] * 3, nodes(9))

    found = groups(nodes(9), met, due={*nodes(9)}, size=3, room=9)

    assert not meetings(found, nodes(9)).keys() & met.keys()


def test_two_nodes_alone_are_not_checked_because_they_could_only_accuse_each_other() -> None:
    assert groups(nodes(2), {}, due={*nodes(2)}, size=4, room=4) == []


@given(
    st.dictionaries(st.sampled_from([*nodes(30)]), st.floats(0, 200), max_size=30),
    st.integers(3, 8),
    st.integers(0, 40),
)
def test_every_group_is_of_different_idle_nodes_and_has_one_that_is_due(
    idle: dict[str, float], size: int, room: int
) -> None:
    due = {node for node, checked_s in idle.items() if checked_s < 100.0}
    found = groups(idle, {}, due=due, size=size, room=room)

    members = [node for group in found for node in group]
    assert len(set(members)) == len(members) <= room
    assert set(members) <= idle.keys()
    assert all(3 <= len(group) <= size for group in found)
    assert all(due & {*group} for group in found)


def test_a_stranger_is_preferred_to_one_that_waits_for_longer() -> None:
    idle = {"first": 0.0, "second": 10.0, "known": 20.0, "stranger": 90.0}
    met = meetings([["first", "known"]], idle)

    (group,) = groups(idle, met, due={*idle}, size=3, room=3)

    assert group == ("first", "second", "stranger")


def test_of_strangers_the_one_that_waits_longest_is_taken() -> None:
    idle = {"first": 0.0, "young": 90.0, "old": 10.0, "older": 5.0}

    (group,) = groups(idle, {}, due={*idle}, size=3, room=3)

    assert group == ("first", "old", "older")
