# SPDX-License-Identifier: Apache-2.0
"""Bad input ends in a typed error or in weaker evidence, never in a crash or a conviction."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_health.preflight.localize.localizer import (
    GroupResult,
    Level,
    Localizer,
    LocalizeSettings,
    Outcome,
)
from slurm_health.records.errors import LocalizeError
from tests.preflight.localize.test_localizer import accused, planned, run

FOUR = ["n1", "n2", "n3", "n4"]
BAD_TIMES = [math.nan, math.inf, -math.inf, 0.0, -1.0]


def well(group: tuple[str, ...], ms: float = 50.0) -> GroupResult:
    return GroupResult(nodes=group, outcome=Outcome.MEASURED, shared_ms={"allgather": ms})


def failed(group: tuple[str, ...], **who: Any) -> GroupResult:
    return GroupResult(nodes=group, outcome=Outcome.FAILED, **who)


@pytest.mark.parametrize(
    ("index", "report", "said"),
    [
        (1, lambda _one, _other: [], "never planned"),
        (-1, lambda _one, _other: [], "never planned"),
        (0, lambda one, other: [well((one[0], other[0]))], "never planned the group"),
        (0, lambda one, _: [failed(one, crashed=("x9",))], "reports about x9"),
        (0, lambda one, other: [failed(one, silent=(other[0],))], "not a member"),
    ],
)
def test_a_report_of_what_was_not_planned_is_refused(
    index: int, report: Callable[..., list[GroupResult]], said: str
) -> None:
    loc = Localizer(FOUR)
    with pytest.raises(LocalizeError, match="round 0 was never planned"):
        loc.observe(0, [])
    groups = planned(loc).groups
    with pytest.raises(LocalizeError, match=said):
        loc.observe(index, report(*groups))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        *[({"prior": {"n1": prior}}, "prior of n1") for prior in (-0.1, 1.1, math.nan)],
        ({"topology": {"a": ("n1", "n2"), "b": ("n2",)}}, "two leaf switches"),
        ({"nodes": []}, "no node"),
        ({"nodes": ["n1", "n2", "n1"]}, "named twice: n1"),
    ],
)
def test_a_run_that_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(LocalizeError, match=said):
        Localizer(**{"nodes": FOUR, **wrong})


def test_a_refused_report_changes_nothing() -> None:
    loc = Localizer(FOUR)
    first, _ = planned(loc).groups
    with pytest.raises(LocalizeError):
        loc.observe(0, [well(first), well(("n1", "x"))])
    assert loc.next_round() is not None
    assert loc.verdict().nodes[first[0]].reason == "was never measured"


def test_a_result_that_arrives_twice_counts_once() -> None:
    two = LocalizeSettings(min_rounds=2)
    once, twice = Localizer(FOUR, settings=two), Localizer(FOUR, settings=two)
    for loc, times in ((once, 1), (twice, 3)):
        for _ in range(2):
            round_ = planned(loc)
            for _ in range(times):
                loc.observe(round_.index, [well(group) for group in round_.groups])
    assert once.verdict() == twice.verdict()


def test_two_results_that_contradict_each_other_say_nothing() -> None:
    loc = Localizer(FOUR)
    for _ in range(2):
        round_ = planned(loc)
        loc.observe(round_.index, [well(group) for group in round_.groups])
        failed = [GroupResult(nodes=g, outcome=Outcome.TIMED_OUT) for g in round_.groups]
        loc.observe(round_.index, failed)
    assert not accused(loc.verdict())
    assert {verdict.level for verdict in loc.verdict().nodes.values()} == {Level.INCONCLUSIVE}
    assert "contradict" in loc.verdict().nodes["n1"].evidence[0]


def test_a_late_result_still_counts() -> None:
    loc = Localizer(FOUR)
    first = planned(loc)
    loc.observe(first.index, [well(first.groups[0])])
    planned(loc)
    loc.observe(first.index, [well(first.groups[1])])
    assert loc.verdict().nodes[first.groups[1][0]].level is Level.HEALTHY


@pytest.mark.parametrize("time", BAD_TIMES)
def test_an_impossible_time_is_left_out_and_said_so(time: float) -> None:
    def answer(_index: int, group: tuple[str, ...]) -> GroupResult:
        own = {node: time if node == "n2" else 3.0 for node in group}
        shared = {"allgather": time if "n2" in group else 50.0}
        return replace(well(group), shared_ms=shared, node_ms={"matmul": own})

    verdict, _ = run(FOUR, answer)

    assert not accused(verdict)
    assert any("cannot be a time" in line for line in verdict.nodes["n2"].evidence)


def test_with_half_of_the_nodes_silent_the_others_are_still_judged() -> None:
    nodes = [f"n{number}" for number in range(20)]
    silent = set(nodes[::2])

    def answer(_index: int, group: tuple[str, ...]) -> GroupResult:
        mute = tuple(node for node in group if node in silent)
        outcome = Outcome.TIMED_OUT if mute else Outcome.MEASURED
        return GroupResult(nodes=group, outcome=outcome, silent=mute)

    verdict, _ = run(nodes, answer)

    assert set(verdict.named(Level.INCONCLUSIVE)) == silent
    assert set(verdict.named(Level.HEALTHY)) == set(nodes) - silent


TIMES = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([50.0, 51.0, 1e-300, 1e300])
)


@pytest.mark.heavy
@given(st.data(), st.integers(1, 9))
@settings(max_examples=25)
def test_no_answers_whatever_crash_the_localizer(data: st.DataObject, count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    loc = Localizer(nodes)
    while (round_ := loc.next_round()) is not None:
        results = []
        for group in round_.groups:
            some = st.lists(st.sampled_from(group), unique=True, max_size=2).map(tuple)
            results.append(
                GroupResult(
                    nodes=group,
                    outcome=data.draw(st.sampled_from(list(Outcome))),
                    shared_ms={"allgather": data.draw(TIMES)},
                    node_ms={"matmul": {node: data.draw(TIMES) for node in group}},
                    silent=data.draw(some) if data.draw(st.booleans()) else (),
                    crashed=data.draw(some) if data.draw(st.booleans()) else (),
                )
            )
        loc.observe(round_.index, data.draw(st.permutations(results)))
    verdict = loc.verdict()
    assert list(verdict.nodes) == nodes
    for found in verdict.nodes.values():
        assert found.reason
        assert 0 <= found.probability <= 1
        assert math.isfinite(found.slowdown)
