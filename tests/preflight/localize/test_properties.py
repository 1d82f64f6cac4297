# SPDX-License-Identifier: Apache-2.0
"""What holds for every run, whatever is wrong with the cluster."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_health.preflight.localize.localizer import (
    GroupResult,
    Level,
    Localizer,
    LocalizeSettings,
    Outcome,
    Round,
    Verdict,
)
from slurm_health.preflight.localize.simulate import (
    ALLGATHER_MS,
    MATMUL_MS,
    Faults,
    SimulatedCluster,
    Weather,
    play,
)
from tests.preflight.localize.test_localizer import accused, planned

Journal = list[tuple[Round, list[GroupResult]]]
ORDER = [Level.HEALTHY, Level.INCONCLUSIVE, Level.SLOW, Level.FAULTY]
CALM = settings(max_examples=15)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[str], Faults, int]:
    count = draw(st.integers(2, 12))
    nodes = [f"n{number}" for number in range(count)]
    some = st.lists(st.sampled_from(nodes), max_size=3, unique=True)
    failing = dict.fromkeys(draw(some), draw(st.sampled_from([0.5, 0.9, 1.0])))
    network = dict.fromkeys(draw(some), draw(st.sampled_from([1.1, 1.3, 3.0])))
    return nodes, Faults(failing=failing, network=network), draw(st.integers(0, 1000))


def recorded(nodes: Sequence[str], faults: Faults, seed: int) -> tuple[Verdict, Journal]:
    cluster = SimulatedCluster(nodes, faults=faults, weather=Weather(), seed=seed)
    loc = Localizer(nodes, settings=LocalizeSettings(seed=seed))
    journal: Journal = []
    while (round_ := loc.next_round()) is not None:
        results = cluster.answer(round_)
        loc.observe(round_.index, results)
        journal.append((round_, results))
    return loc.verdict(), journal


@given(clusters())
@CALM
def test_each_node_is_in_a_round_at_most_once(scene: tuple[list[str], Faults, int]) -> None:
    nodes, _, _ = scene
    _, journal = recorded(*scene)
    for round_, _ in journal:
        members = [node for group in round_.groups for node in group]
        assert len(members) == len(set(members))
        assert set(members) <= set(nodes)
        assert all(len(group) == 2 for group in round_.groups)


@given(st.integers(4, 40), st.integers(0, 1000))
@CALM
def test_no_partner_is_repeated_while_an_unmet_one_would_do(count: int, seed: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    rounds = min(6, count // 2)
    chosen = LocalizeSettings(seed=seed, min_rounds=rounds, max_rounds=rounds)
    loc = Localizer(nodes, settings=chosen)
    met: set[frozenset[str]] = set()
    while (round_ := loc.next_round()) is not None:
        pairs = {frozenset(group) for group in round_.groups}
        assert not pairs & met
        met |= pairs
        loc.observe(
            round_.index, [GroupResult(nodes=g, outcome=Outcome.MEASURED) for g in round_.groups]
        )
    assert len(met) == rounds * (count // 2)


@pytest.mark.heavy
@given(clusters())
@CALM
def test_replaying_a_journal_gives_the_same_rounds_and_verdict(
    scene: tuple[list[str], Faults, int],
) -> None:
    nodes, _, seed = scene
    verdict, journal = recorded(*scene)
    loc = Localizer(nodes, settings=LocalizeSettings(seed=seed))
    for round_, results in journal:
        assert loc.next_round() == round_
        loc.observe(round_.index, list(reversed(results)))
    assert loc.next_round() is None
    assert loc.verdict() == verdict


@pytest.mark.heavy
@given(clusters())
@CALM
def test_renaming_nodes_renames_the_verdict_and_changes_nothing_else(
    scene: tuple[list[str], Faults, int],
) -> None:
    nodes, faults, seed = scene
    new = {node: f"z{1000 - place}" for place, node in enumerate(nodes)}
    renamed = replace(
        faults,
        failing={new[node]: p for node, p in faults.failing.items()},
        network={new[node]: factor for node, factor in faults.network.items()},
    )
    before, journal = recorded(*scene)
    after, again = recorded([new[node] for node in nodes], renamed, seed)
    for (one, _), (other, _) in zip(journal, again, strict=True):
        assert tuple(tuple(new[n] for n in group) for group in one.groups) == other.groups
    for node in nodes:
        was, now = before.nodes[node], after.nodes[new[node]]
        assert (was.level, was.slowdown, was.probability) == (
            now.level,
            now.slowdown,
            now.probability,
        )


@pytest.mark.heavy
@given(clusters(), st.randoms(use_true_random=False))
@CALM
def test_a_better_result_never_worsens_a_node(
    scene: tuple[list[str], Faults, int], rng: random.Random
) -> None:
    nodes, _, seed = scene
    verdict, journal = recorded(*scene)
    round_, results = journal[-1]
    place = rng.randrange(len(results))
    group = results[place].nodes
    good = GroupResult(
        nodes=group,
        outcome=Outcome.MEASURED,
        shared_ms={"allgather": ALLGATHER_MS},
        node_ms={"matmul": dict.fromkeys(group, MATMUL_MS)},
    )
    loc = Localizer(nodes, settings=LocalizeSettings(seed=seed))
    for earlier, answers in journal[:-1]:
        loc.next_round()
        loc.observe(earlier.index, answers)
    loc.next_round()
    loc.observe(round_.index, [*results[:place], good, *results[place + 1 :]])
    for node in group:
        before, after = verdict.nodes[node].level, loc.verdict().nodes[node].level
        assert ORDER.index(after) <= ORDER.index(before)


@given(clusters())
@CALM
def test_who_is_condemned_failed_with_partners_that_passed(
    scene: tuple[list[str], Faults, int],
) -> None:
    verdict, journal = recorded(*scene)
    results = [result for _, answers in journal for result in answers]
    passed = {n for r in results if r.outcome is Outcome.MEASURED for n in r.nodes}
    for node in verdict.named(Level.FAULTY):
        witnesses = {
            other
            for result in results
            if result.outcome is Outcome.TIMED_OUT and node in result.nodes
            for other in result.nodes
            if other != node and other in passed
        }
        assert len(witnesses) >= 2
        assert verdict.nodes[node].evidence


def judged(
    count: int, faults: Faults, weather: Weather, seed: int, **more: object
) -> tuple[Verdict, int]:
    nodes = [f"n{number}" for number in range(count)]
    cluster = SimulatedCluster(nodes, faults=faults, weather=weather, seed=seed)
    loc = Localizer(nodes, settings=replace(LocalizeSettings(seed=seed), **more))  # type: ignore[arg-type]
    verdict, rounds = play(loc, cluster)
    return verdict, len(rounds)


@pytest.mark.heavy
def test_in_healthy_runs_with_rough_noise_nobody_is_accused() -> None:
    for seed in range(12):
        for count, noise in ((4, 0.05), (4, 0.25), (6, 0.15), (8, 0.05)):
            verdict, _ = judged(count, Faults(), Weather(noise=noise), seed)
            assert not accused(verdict), (seed, count, noise)


def test_nodes_that_fail_nine_times_of_ten_are_found_among_hiccups() -> None:
    flaky = random.Random(5).sample([f"n{number}" for number in range(256)], 13)
    faults = Faults(failing=dict.fromkeys(flaky, 0.9))
    verdict, _ = judged(256, faults, Weather(hiccups=0.002), 0)
    assert accused(verdict) <= set(flaky)
    assert len(accused(verdict)) >= 12


def test_a_slowdown_below_the_floor_is_not_reported() -> None:
    for seed in range(8):
        verdict, _ = judged(16, Faults(network={"n3": 1.04}), Weather(), seed)
        assert not accused(verdict)


def test_a_prior_alone_convicts_nobody_and_acquits_nobody() -> None:
    nodes = [f"n{number}" for number in range(8)]
    cluster = SimulatedCluster(nodes, faults=Faults(failing={"n1": 1.0}), weather=Weather())
    loc = Localizer(nodes, prior={"n0": 1.0, "n1": 0.0})
    verdict, _ = play(loc, cluster)
    assert accused(verdict) == {"n1"}


def test_nodes_with_a_history_meet_trusted_ones_first() -> None:
    nodes = [f"n{number}" for number in range(8)]
    known = {"n1", "n2", "n5"}
    for seed in range(5):
        loc = Localizer(
            nodes, prior=dict.fromkeys(known, 0.3), settings=LocalizeSettings(seed=seed)
        )
        assert all(len(known & set(group)) <= 1 for group in planned(loc).groups)
