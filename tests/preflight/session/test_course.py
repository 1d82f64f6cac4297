# SPDX-License-Identifier: Apache-2.0
"""The phases of a check, driven with the real Localizer and invented results."""

from collections.abc import Callable, Mapping, Sequence

from slurm_health.preflight.localize.settings import DeviceKind, LocalizeSettings, settings_from
from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.session.course import Course, RoundPlanner
from slurm_health.preflight.session.phases import phases
from slurm_health.records.verdict import GroupResult, Level, Outcome
from tests.support.rows import rows

NODES = ("n1", "n2", "n3", "n4")
Ended = list[Sequence[GroupResult]]


def course(check: str, nodes: Sequence[str] = NODES, **expected_ms: float) -> Course:
    settings = LocalizeSettings(expected_ms=expected_ms)
    return Course(nodes, None, phases([check]), make_localizer, settings)


def run(
    under_test: Course,
    answer: Callable[[str, tuple[str, ...]], GroupResult],
) -> tuple[Ended, list[str]]:
    """Play a course to its end; return what was measured and the phase of each round."""
    ended: Ended = []
    names = []
    while (planned := under_test.next_round(ended)) is not None:
        assert under_test.phase is not None
        names.append(under_test.phase.name)
        ended.append([answer(names[-1], group) for group in planned.groups])
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


def nodes_of(phase: str, ended: Ended, names: Sequence[str]) -> list[set[str]]:
    """Return which nodes took part in each round of a phase."""
    return [
        {node for result in results for node in result.nodes}
        for results, name in zip(ended, names, strict=True)
        if name == phase
    ]


@rows
def test_who_fails_twice_alone_is_faulty_and_meets_nobody(
    crashed: bool, said: str, reason: str
) -> None:
    outcome = Outcome.FAILED if crashed else Outcome.TIMED_OUT

    def answer(phase: str, group: tuple[str, ...]) -> GroupResult:
        if phase == "solo" and group == ("n3",):
            words, dead = ({"n3": said}, group) if crashed else ({}, ())
            return GroupResult(nodes=group, outcome=outcome, crashed=dead, said=words)
        return measured(group)

    under_test = course("standard")
    ended, names = run(under_test, answer)

    verdict = under_test.verdict()
    assert verdict.named(Level.FAULTY) == ("n3",)
    assert verdict.nodes["n3"].reason == reason
    assert not any("n3" in nodes for nodes in nodes_of("pair", ended, names))


def test_while_a_process_that_crashed_alone_starts_again_the_others_meet() -> None:
    under_test = course("standard")
    _, names = run(under_test, crashing_alone("n3", 2))

    assert names == ["solo", "pair", "pair", "pair", "solo"]
    assert under_test.verdict().nodes["n1"].reason == "passed with 2 partners"
    _, names = run(course("standard", ("n1", "n3")), crashing_alone("n3", 2))
    assert names[:2] == ["solo", "solo"]  # with one other node there is nobody to meet


def test_who_crashed_alone_once_meets_the_others_after_them() -> None:
    under_test = course("standard")
    ended, names = run(under_test, crashing_alone("n3", 1))

    met = nodes_of("pair", ended, names)
    assert names == ["solo", "pair", "pair", "pair", "solo", "solo", "pair"]
    assert met[-1] == set(NODES)
    assert not any("n3" in nodes for nodes in met[:-1])
    assert set(under_test.verdict().named(Level.HEALTHY)) == set(NODES)


def test_who_is_slow_alone_is_compared_with_all_others_once_more() -> None:
    slow = {"n3": 2.0}
    ended, names = run(course("standard"), lambda _, group: measured(group, slow))

    alone = [len(results) for results, phase in zip(ended, names, strict=True) if phase == "solo"]
    assert len(alone) > 1
    assert set(alone) == {len(NODES)}


def test_nobody_is_blamed_for_what_could_not_be_measured() -> None:
    said = {"n2": "another process holds the device"}

    def answer(_phase: str, group: tuple[str, ...]) -> GroupResult:
        if "n2" not in group:
            return measured(group)
        return GroupResult(nodes=group, outcome=Outcome.NOT_RUN, silent=("n2",), said=said)

    under_test = course("standard")
    run(under_test, answer)
    verdict = under_test.verdict()

    assert verdict.named(Level.HEALTHY) == ("n1", "n3", "n4")
    assert verdict.nodes["n2"].level is Level.INCONCLUSIVE
    assert verdict.nodes["n2"].reason == f"could not be measured: {said['n2']}"


def test_a_slow_node_trains_no_gpt() -> None:
    under_test = course("thorough")

    ended, names = run(under_test, lambda _, group: measured(group, {"n4": 1.5}))

    assert under_test.verdict().named(Level.SLOW) == ("n4",)
    assert set().union(*nodes_of("gpt", ended, names)) == {"n1", "n2", "n3"}


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
