# SPDX-License-Identifier: Apache-2.0
"""Steps are measured within a budget, and a later call continues."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu import figures_file
from benchmarks.gpu.figures_file import Figures
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.plan import Plan, exit_code, measure_left, table
from benchmarks.gpu.step import Amount, Figure, NotMeasured, Section, Step
from tests.gpu.test_verdicts import FACTS

MACHINE = Machine(python="python3", environ={}, facts=FACTS)
RIGHT = Figure(name="time", value=1.5, unit="s")


def gives(*figures: Figure) -> Callable[[Machine], list[Figure]]:
    return lambda _: list(figures)


def gives_nothing(_: Machine) -> list[Figure]:
    raise NotMeasured("no answer")


def plan(takes_s: float = 1.0, **steps: Callable[[Machine], list[Figure]]) -> Plan:
    made = [
        Step(name=name, does="measure it", takes_s=takes_s, measure=measure)
        for name, measure in steps.items()
    ]
    section = Section(number=1, title="played", steps=lambda _: made)
    return Plan(sections=[section], amount=Amount())


def call(steps: Plan, file: Path, budget_s: float = 60.0) -> Figures:
    figures = figures_file.read(file, FACTS, small=False)
    return measure_left(steps, MACHINE, figures, file, time.monotonic() + budget_s)


def test_a_step_that_would_not_end_in_time_is_left_to_the_next_call(tmp_path: Path) -> None:
    steps = plan(takes_s=90.0, a=gives(RIGHT))

    first = call(steps, tmp_path / "gpu.json", budget_s=60.0)

    assert "left: 1 a" in table(steps, first)
    assert exit_code(steps, first) == 3
    second = call(steps, tmp_path / "gpu.json", budget_s=100.0)
    assert "| 1 a    | time     | 1.5 s   |" in table(steps, second)
    assert exit_code(steps, second) == 0


def test_what_was_measured_is_not_measured_again_and_the_rest_is(tmp_path: Path) -> None:
    call(plan(a=gives(RIGHT), b=gives_nothing), tmp_path / "gpu.json")

    steps = plan(a=gives_nothing, b=gives(RIGHT))
    again = call(steps, tmp_path / "gpu.json")

    assert exit_code(steps, again) == 0


def test_what_could_not_be_measured_is_named_with_its_reason(tmp_path: Path) -> None:
    steps = plan(a=gives_nothing)

    figures = call(steps, tmp_path / "gpu.json")

    assert "not measured: 1 a: no answer" in table(steps, figures)
    assert exit_code(steps, figures) == 3


@pytest.mark.parametrize("other", [gives(RIGHT), gives_nothing])
def test_a_wrong_result_decides_the_exit_code(
    tmp_path: Path, other: Callable[[Machine], list[Figure]]
) -> None:
    wrong = Figure(name="verdict", value="local0 faulty", wrong="local0 is well")
    steps = plan(a=gives(wrong), b=other)

    figures = call(steps, tmp_path / "gpu.json")

    assert "WRONG: 1 a: verdict: local0 is well" in table(steps, figures)
    assert exit_code(steps, figures) == 1
