# SPDX-License-Identifier: Apache-2.0
"""Sessions in any world: each ends, and what it knows follows from its journal alone."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.session.phases import phases
from slurm_health.preflight.session.session import Append, Conclude
from slurm_health.records.records import (
    AgentsLaunched,
    NodesAdmitted,
    RoundEnded,
    RoundStarted,
    VerdictReached,
)
from slurm_health.records.verdict import Level
from tests.support.session_story import LIMITS, NODES, names
from tests.support.world import World

many = settings(max_examples=100)


@many
@given(
    st.integers(1, 6),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.lists(st.integers(1, 40), max_size=3),
)
def test_every_check_ends_and_a_new_reader_comes_to_the_same_verdict(
    count: int, seed: int, trouble: float, deaths: list[int]
) -> None:
    world = World(names(count), Random(seed), trouble=trouble, limits=LIMITS)

    session = world.play(die_after=deaths)

    verdict = session.state.verdict
    assert verdict is not None
    assert [node.node for node in verdict.nodes] == list(world.nodes)
    again = world.replayed()
    assert again.next_step(world.now_s) == Conclude()
    assert again.state.ended == session.state.ended
    assert again.state.verdict == verdict


@many
@given(
    st.integers(1, 6),
    st.integers(0, 2**32),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.lists(st.integers(1, 40), max_size=2),
)
def test_what_is_concluded_follows_from_the_journal_alone(
    count: int, seed: int, trouble: float, deaths: list[int]
) -> None:
    world = World(names(count), Random(seed), trouble=trouble, limits=LIMITS)
    verdict = world.play(die_after=deaths).state.verdict
    undecided = world.replayed(without=VerdictReached)

    step = undecided.next_step(world.now_s)

    assert verdict is not None
    assert step == Append(record=verdict)


@settings(max_examples=20)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(5, 40), max_size=2),
    st.sampled_from(["quick", "standard", "thorough"]),
)
def test_the_real_localizer_is_never_given_what_it_did_not_plan(
    seed: int, deaths: list[int], check: str
) -> None:
    world = World(
        names(5),
        Random(seed),
        trouble=0.4,
        limits=LIMITS,
        make_localizer=make_localizer,
        course=phases([check]),
    )

    session = world.play(die_after=deaths)

    assert session.state.verdict is not None


@pytest.mark.parametrize("death", range(1, 30))
def test_a_master_may_die_at_any_step_of_an_untroubled_check(death: int) -> None:
    world = World(NODES, Random(0), trouble=0.0, limits=LIMITS)

    verdict = world.play(die_after=[death]).state.verdict

    assert verdict is not None
    assert {node.level for node in verdict.nodes} <= {Level.HEALTHY, Level.INCONCLUSIVE}


@pytest.mark.parametrize("trouble", [0.0, 0.5])
def test_a_master_killed_on_any_write_is_gone_on_for_and_nothing_is_done_twice(
    trouble: float,
) -> None:
    untroubled = World(names(4), Random(1), trouble=trouble, limits=LIMITS)
    untroubled.play()

    for killed_at in range(2, len(untroubled.master_log) + 1):
        # The third one dies again, where the second one has just begun.
        world = World(names(4), Random(1), trouble=trouble, limits=LIMITS)
        world.play(killed_at=[killed_at, killed_at + 2])

        written = [entry.record for entry in world.master_log]
        launches = [each.launch for each in written if isinstance(each, AgentsLaunched)]
        rounds = [each.round for each in written if isinstance(each, RoundStarted)]
        ended = [each.round for each in written if isinstance(each, RoundEnded)]
        assert launches == list(range(len(launches)))
        assert rounds == ended == list(range(len(rounds)))
        assert sum(isinstance(each, NodesAdmitted) for each in written) <= 1
        assert isinstance(written[-1], VerdictReached)
        assert sum(isinstance(each, VerdictReached) for each in written) == 1


@many
@given(st.integers(0, 2**32))
def test_no_node_is_launched_more_often_than_allowed(seed: int) -> None:
    world = World(names(4), Random(seed), trouble=1.0, limits=LIMITS)

    world.play()

    launched = [
        node
        for entry in world.master_log
        if isinstance(entry.record, AgentsLaunched)
        for node in entry.record.nodes
    ]
    assert all(launched.count(node) <= LIMITS.launches_per_node for node in world.nodes)
