# SPDX-License-Identifier: Apache-2.0
"""Checks in any world: each ends, and what it concludes follows from its journal alone."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.session.phases import phases
from slurm_health.records.records import AgentsLaunched, VerdictReached
from tests.preflight.session.world import World
from tests.support.session_story import LIMITS, names


@settings(max_examples=200)
@given(st.integers(1, 6), st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_every_check_ends_and_a_reader_of_its_journal_comes_to_the_same_verdict(
    count: int, seed: int, trouble: float
) -> None:
    world = World(names(count), Random(seed), trouble=trouble, limits=LIMITS)

    state = world.play().state

    verdict = state.verdict
    assert verdict is not None
    assert [node.node for node in verdict.nodes] == list(world.nodes)
    again = world.replayed()
    assert again.next_step(world.now_s) == ()
    assert again.state.ended == state.ended
    assert world.replayed(without=VerdictReached).next_step(world.now_s) == (verdict,)
    records = [entry.record for entry in world.master_log]
    launched = [n for each in records if isinstance(each, AgentsLaunched) for n in each.nodes]
    assert all(launched.count(node) <= LIMITS.launches_per_node for node in world.nodes)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from(["quick", "standard", "thorough"]))
def test_the_real_localizer_is_never_given_what_it_did_not_plan(seed: int, check: str) -> None:
    world = World(
        names(5),
        Random(seed),
        trouble=0.4,
        limits=LIMITS,
        make_localizer=make_localizer,
        course=phases([check]),
    )

    assert world.play().state.verdict is not None
