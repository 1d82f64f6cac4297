# SPDX-License-Identifier: Apache-2.0
"""Whom a sweep checks together, whatever is idle; tests/frozen has whom it chooses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_health.fleet.partners import groups

NODES = [f"n{number:02}" for number in range(30)]


@given(
    st.dictionaries(st.sampled_from(NODES), st.floats(0, 200), max_size=30),
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
