# SPDX-License-Identifier: Apache-2.0
"""Diagnosticians of others observe again and again, and one that fails asks for no action."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_health.training.plugins import (
    ActionKind,
    DataCollector,
    DataManager,
    DiagnosisAction,
    DiagnosisManager,
    DiagnosisObservation,
    Diagnostician,
    EventAction,
    LeaveNode,
    NoAction,
    RestartRanks,
    StopJob,
)
from tests.training.plugins.test_data import Clock


class Thermometer(DataCollector):
    def __init__(self, *heats: int) -> None:
        self._heats = iter(heats)

    def is_enabled(self) -> bool:
        return True

    def collect_data(self) -> object:
        return next(self._heats)  # StopIteration: it broke


class Heat(Diagnostician):
    def observe(self, **kwargs: Any) -> DiagnosisObservation | None:
        heat = kwargs["data_manager"].latest("Thermometer")
        return DiagnosisObservation("hot", {"heat": str(heat)}) if heat > 90 else None

    def resolve(self, problem: DiagnosisObservation, **_kwargs: Any) -> DiagnosisAction:
        return RestartRanks(reason=f"{problem.observation}: {problem.details['heat']}")


class Broken(Diagnostician):
    def diagnose(self, **_kwargs: Any) -> DiagnosisAction:
        raise OSError("no barometer")


class Wrong(Diagnostician):
    def diagnose(self, **_kwargs: Any) -> DiagnosisAction:
        return "restart"  # type: ignore[return-value]


class TwoProblems(Diagnostician):
    """Observes twice for one failure."""

    def observe(self, **kwargs: Any) -> DiagnosisObservation | None:
        return DiagnosisObservation(kwargs["part"])

    def diagnose(self, **kwargs: Any) -> DiagnosisAction:
        seen = [self.observe(part=part, **kwargs) for part in ("disk", "link")]
        return EventAction(reason=" and ".join(each.observation for each in seen if each))


def test_a_diagnostician_that_is_not_subclassed_tells_of_a_problem_that_is_not_known() -> None:
    assert Diagnostician().diagnose() == EventAction(reason="unknown")


def test_a_diagnosis_that_fails_is_no_action() -> None:
    action = Heat().diagnose(data_manager=DataManager(Clock()))

    assert isinstance(action, NoAction)
    assert "TypeError" in action.failed


def test_what_is_registered_collects_and_observes_again_and_again_at_its_own_times() -> None:
    clock = Clock()
    manager = DiagnosisManager(DataManager(clock), clock)
    manager.register_collector(Thermometer(60, 95), every_s=10.0)
    manager.register_diagnostician("heat", Heat(), every_s=20.0)
    manager.register_diagnostician("twice", TwoProblems(), every_s=60.0)

    assert manager.look() == {"heat": NoAction(), "twice": EventAction(reason="disk and link")}
    assert manager.look() == {}
    clock.now_s += 10.0
    assert manager.look() == {}
    clock.now_s += 10.0
    assert manager.look() == {"heat": RestartRanks(reason="hot: 95")}
    assert list(manager.failed) == ["Thermometer"]  # it had no third heat


def test_one_that_fails_costs_the_others_nothing() -> None:
    clock = Clock()
    manager = DiagnosisManager(DataManager(clock), clock)
    manager.register_diagnostician("broken", Broken(), every_s=1.0)
    manager.register_diagnostician("wrong", Wrong(), every_s=1.0)
    manager.register_diagnostician("twice", TwoProblems(), every_s=1.0)
    asked = manager.look()

    assert asked["broken"] == NoAction(failed="OSError: no barometer")
    assert asked["wrong"] == NoAction(failed="it answered with str instead of an action")
    assert asked["twice"].kind is ActionKind.EVENT


def test_a_name_is_registered_once() -> None:
    manager = DiagnosisManager(DataManager(Clock()), Clock())
    manager.register_diagnostician("heat", Heat(), every_s=1.0)
    with pytest.raises(ValueError, match="give it another name"):
        manager.register_diagnostician("heat", Heat(), every_s=1.0)


@pytest.mark.parametrize("told", [{"nodes": ("n1",)}, {"evidence": ("it smokes",)}, {}])
def test_no_node_is_left_without_evidence(told: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match="evidence"):
        LeaveNode(**told)  # type: ignore[arg-type]


def test_actions_say_whether_they_are_the_masters() -> None:
    leaves = LeaveNode(nodes=("n1",), evidence=("it smokes",))

    assert [each.is_the_masters for each in (NoAction(), EventAction(), RestartRanks())] == [
        False
    ] * 3
    assert [each.is_the_masters for each in (leaves, StopJob())] == [True, True]
