# SPDX-License-Identifier: Apache-2.0
"""The phases of a check, driven with the real Localizer and invented results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

import pytest
from msgspec.structs import replace

from slurm_health.preflight.localize.settings import DeviceKind, LocalizeSettings, settings_from
from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.session.conclusion import merged, with_burns, with_transports
from slurm_health.preflight.session.phase_runner import Course, RoundPlanner
from slurm_health.preflight.session.phases import phases
from slurm_health.records.gpu_load import HARDWARE_THERMAL, Burn
from slurm_health.records.verdict import (
    GroupResult,
    Level,
    LinkVerdict,
    NodeVerdict,
    Outcome,
    Verdict,
)

NODES = ("n1", "n2", "n3", "n4")
Ended = list[tuple[int, Sequence[GroupResult]]]


def course(check: str, nodes: Sequence[str] = NODES, **expected_ms: float) -> Course:
    settings = LocalizeSettings(expected_ms=expected_ms)
    return Course(nodes, None, phases([check]), make_localizer, settings)


def run(
    under_test: Course,
    answer: Callable[[str, tuple[str, ...]], GroupResult],
    *,
    void: int | None = None,
) -> tuple[Ended, list[str]]:
    """Play a course to its end; return what was measured and the phase of each round.

    The round `void` has no results.
    """
    ended: Ended = []
    names = []
    while (planned := under_test.next_round(ended)) is not None:
        assert planned.index == len(ended)
        assert under_test.phase is not None
        names.append(under_test.phase.name)
        groups = planned.groups if planned.index != void else ()
        ended.append((planned.index, [answer(names[-1], group) for group in groups]))
    return ended, names


def measured(group: tuple[str, ...], slow: Mapping[str, float] | None = None) -> GroupResult:
    """Return what healthy members measure, but for those that are `slow` by a factor in matmul."""
    factors = slow or {}
    return GroupResult(
        nodes=group,
        outcome=Outcome.MEASURED,
        shared_ms={"allgather": 50.0} if len(group) > 1 else {},
        node_ms={"matmul": {node: 3.0 * factors.get(node, 1.0) for node in group}},
    )


def crashing_alone(node: str, times: int) -> Callable[[str, tuple[str, ...]], GroupResult]:
    """Return answers in which a node's process crashes so often when it works alone."""
    crashed: list[str] = []

    def answer(phase: str, group: tuple[str, ...]) -> GroupResult:
        if phase == "solo" and group == (node,) and len(crashed) < times:
            crashed.append(node)
            return GroupResult(nodes=group, outcome=Outcome.FAILED, crashed=group)
        return measured(group)

    return answer


def test_healthy_nodes_pass_each_phase_in_its_least_rounds() -> None:
    under_test = course("thorough")

    _, names = run(under_test, lambda _, group: measured(group))

    assert names == ["solo", "pair", "size", "gpt", "gpt"]
    assert under_test.verdict().named(Level.HEALTHY) == NODES


@pytest.mark.parametrize("crashes", [0, 1, 9])
def test_a_course_that_is_replayed_comes_to_the_same_round(crashes: int) -> None:
    ended, _ = run(course("thorough"), crashing_alone("n3", crashes))

    for known in range(len(ended)):
        planned = course("thorough").next_round(ended[:known])
        assert planned is not None
        assert planned.index == known
        assert set(planned.groups) == {result.nodes for result in ended[known][1]}


@pytest.mark.parametrize("void", range(5))
def test_a_round_that_a_masters_end_made_void_is_planned_again_and_costs_nobody(void: int) -> None:
    under_test = course("thorough")

    _, names = run(under_test, lambda _, group: measured(group), void=void)

    without = ["solo", "pair", "size", "gpt", "gpt"]
    assert names == [*without[: void + 1], *without[void:]]
    assert under_test.verdict().named(Level.HEALTHY) == NODES


def test_who_calculates_wrongly_twice_alone_meets_nobody() -> None:
    text = "device 0 computes wrong results"

    def answer(phase: str, group: tuple[str, ...]) -> GroupResult:
        if phase == "solo" and group == ("n3",):
            said = {"n3": text}
            return GroupResult(nodes=group, outcome=Outcome.FAILED, crashed=group, said=said)
        return measured(group)

    under_test = course("standard")
    ended, names = run(under_test, answer)
    verdict = under_test.verdict()

    assert verdict.named(Level.FAULTY) == ("n3",)
    assert verdict.nodes["n3"].reason == f"{text} (rounds 0 and 4)"
    assert not any(
        "n3" in result.nodes
        for (_, results), phase in zip(ended, names, strict=True)
        if phase == "pair"
        for result in results
    )


def test_while_a_process_that_crashed_alone_starts_again_the_others_meet() -> None:
    under_test = course("standard")
    _, names = run(under_test, crashing_alone("n3", 2))

    assert names == ["solo", "pair", "pair", "pair", "solo"]
    assert under_test.verdict().nodes["n1"].reason == "passed with 2 partners"


def test_with_one_other_node_left_nobody_waits_to_be_tested_alone_again() -> None:
    _, names = run(course("standard", ("n1", "n3")), crashing_alone("n3", 2))

    assert names[:2] == ["solo", "solo"]


def test_who_crashed_alone_once_meets_the_others_after_them() -> None:
    under_test = course("standard")
    ended, names = run(under_test, crashing_alone("n3", 1))

    met = [
        {node for result in results for node in result.nodes}
        for (_, results), phase in zip(ended, names, strict=True)
        if phase == "pair"
    ]
    assert names == ["solo", "pair", "pair", "pair", "solo", "solo", "pair"]
    assert met[-1] == set(NODES)
    assert not any("n3" in nodes for nodes in met[:-1])
    assert set(under_test.verdict().named(Level.HEALTHY)) == set(NODES)


def test_who_is_slow_alone_is_compared_with_all_others_once_more() -> None:
    slow = {"n3": 2.0}
    ended, names = run(course("standard"), lambda _, group: measured(group, slow))

    alone = [
        len(results) for (_, results), phase in zip(ended, names, strict=True) if phase == "solo"
    ]
    assert len(alone) > 1
    assert set(alone) == {len(NODES)}


def test_a_node_that_hangs_twice_alone_is_said_to_have_hung() -> None:
    def answer(phase: str, group: tuple[str, ...]) -> GroupResult:
        if phase == "solo" and group == ("n3",):
            return GroupResult(nodes=group, outcome=Outcome.TIMED_OUT)
        return measured(group)

    under_test = course("standard")
    run(under_test, answer)

    assert under_test.verdict().named(Level.FAULTY) == ("n3",)
    assert under_test.verdict().nodes["n3"].reason == "did not finish in time (rounds 0 and 4)"


def test_nobody_is_blamed_for_what_could_not_be_measured() -> None:
    text = "another process holds the device"

    def answer(phase: str, group: tuple[str, ...]) -> GroupResult:
        if "n2" in group:
            said = {"n2": text}
            return GroupResult(nodes=group, outcome=Outcome.NOT_RUN, silent=("n2",), said=said)
        return measured(group)

    under_test = course("standard")
    run(under_test, answer)
    verdict = under_test.verdict()

    assert verdict.named(Level.HEALTHY) == ("n1", "n3", "n4")
    assert verdict.nodes["n2"].level is Level.INCONCLUSIVE
    assert verdict.nodes["n2"].reason == f"could not be measured: {text}"


def test_a_slow_node_trains_no_gpt() -> None:
    under_test = course("thorough")

    ended, names = run(under_test, lambda _, group: measured(group, {"n4": 1.5}))

    assert under_test.verdict().named(Level.SLOW) == ("n4",)
    trained = {
        node
        for (_, results), phase in zip(ended, names, strict=True)
        if phase == "gpt"
        for result in results
        for node in result.nodes
    }
    assert trained == {"n1", "n2", "n3"}


@pytest.mark.parametrize("slowdown", [1.15, 1.5, 4.0])
def test_slow_memory_shows_in_what_a_node_does_alone(slowdown: float) -> None:
    noise = Random(7)

    def answer(phase: str, group: tuple[str, ...]) -> GroupResult:
        copy_ms = {
            node: 10.0 * noise.gauss(1.0, 0.01) * (slowdown if node == "n2" else 1.0)
            for node in group
        }
        result = measured(group)
        if phase != "solo":
            return result
        return replace(result, node_ms={**result.node_ms, "memory_copy": copy_ms})

    under_test = course("standard")
    run(under_test, answer)

    assert under_test.verdict().named(Level.SLOW) == ("n2",)
    assert under_test.verdict().nodes["n2"].component == "memory"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_node_is_as_bad_as_its_worst_phase_and_has_the_evidence_of_all(
    order: tuple[int, int],
) -> None:
    well = NodeVerdict(node="n1", level=Level.HEALTHY, reason="well", evidence=("a",))
    slow = NodeVerdict(
        node="n1", level=Level.SLOW, slowdown=1.4, reason="copy slow", evidence=("b",)
    )
    both = (Verdict(nodes={"n1": well}), Verdict(nodes={"n1": slow}))

    found = merged([both[at] for at in order]).nodes["n1"]

    assert (found.level, found.reason, found.slowdown) == (Level.SLOW, "copy slow", 1.4)
    assert set(found.evidence) == {"a", "b"}


def test_what_a_throttled_gpu_said_explains_and_does_not_convict() -> None:
    throttled = Burn(
        index=3, uuid="GPU-7", bus="", samples=9, reason_samples={HARDWARE_THERMAL: 9}, reasons=64
    )
    before = Verdict(nodes={"n1": NodeVerdict(node="n1", level=Level.HEALTHY, reason="well")})

    found = with_burns(before, {"n1": [throttled]}).nodes["n1"]

    assert found.level is Level.HEALTHY
    assert "GPU 3 (GPU-7): hardware thermal slowdown" in found.reason


def test_memory_errors_that_were_not_corrected_are_proof() -> None:
    broken = Burn(index=0, uuid="GPU-1", bus="", samples=9, uncorrected=2)
    before = Verdict(nodes={"n1": NodeVerdict(node="n1", level=Level.HEALTHY, reason="well")})

    found = with_burns(before, {"n1": [broken]}).nodes["n1"]

    assert (found.level, found.component) == (Level.FAULTY, "memory")
    assert found.evidence


def test_the_way_that_data_went_is_said_where_the_network_is_slow_and_nowhere_else() -> None:
    nodes = {
        name: NodeVerdict(node=name, level=level, component=component, reason="slow")
        for name, level, component in (
            ("n1", Level.SLOW, "network rail 3"),
            ("n2", Level.SLOW, "compute device 1"),
            ("n3", Level.HEALTHY, "network"),
        )
    }

    found = with_transports(Verdict(nodes=nodes), dict.fromkeys(nodes, "NET/Socket")).nodes

    assert [found[name].reason for name in ("n1", "n2", "n3")] == [
        "slow; data went over NET/Socket",
        "slow",
        "slow",
    ]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_link_is_as_bad_as_its_worst_phase(order: tuple[int, int]) -> None:
    ends = ("n1", "n2")
    both = (
        Verdict(nodes={}, paths=(LinkVerdict(ends=ends, level=Level.INCONCLUSIVE),)),
        Verdict(nodes={}, paths=(LinkVerdict(ends=ends, level=Level.FAULTY),)),
    )

    (found,) = merged([both[at] for at in order]).paths

    assert found.level is Level.FAULTY


def test_what_was_chosen_holds_in_every_phase_but_for_rounds_of_its_own() -> None:
    chosen = settings_from(
        {"network_floor": 0.3, "min_rounds": 5, "expected_ms": {"matmul": 4.0}}, kind=DeviceKind.CPU
    )
    seen: list[LocalizeSettings] = []

    def make(
        nodes: Sequence[str], leaves: Mapping[str, Sequence[str]] | None, settings: LocalizeSettings
    ) -> RoundPlanner:
        seen.append(settings)
        return make_localizer(nodes, leaves, settings)

    under_test = Course(NODES, None, phases(["thorough"]), make, chosen)
    _, names = run(under_test, lambda _, group: measured(group))

    assert {settings.network_floor for settings in seen} == {0.3}
    assert {settings.expected_ms["matmul"] for settings in seen} == {4.0}
    assert [names.count(name) for name in ("solo", "pair", "size", "gpt")] == [1, 5, 1, 2]
