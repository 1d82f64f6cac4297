# SPDX-License-Identifier: Apache-2.0
"""The steps that are asked for: measured one after another, shown in a table, and judged."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.gpu import figures_file
from benchmarks.gpu.figures_file import Figures, Measured
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.step import Amount, Figure, NotMeasured, Section, Step

_WIDTH = 60


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps that are asked for."""

    sections: Sequence[Section]
    amount: Amount

    def steps(self) -> Iterator[tuple[Section, Step]]:
        """Yield them in their order."""
        for section in self.sections:
            for step in section.steps(self.amount):
                yield section, step


def measure_left(
    plan: Plan, machine: Machine, figures: Figures, output: Path, end_s: float
) -> Figures:
    """Return the figures with those of each step that is left and fits before `end_s`."""
    for section, step in plan.steps():
        if figures.of(section.number, step.name) or time.monotonic() + step.takes_s > end_s:
            continue
        print(f"{section.number} {section.title}: {step.name} ...", file=sys.stderr)
        figures = figures.with_step(measured(machine, section, step))
        figures_file.write(output, figures)
    return figures


def measured(machine: Machine, section: Section, step: Step) -> Measured:
    """Return what a step gives, or why it gives nothing."""
    begun_s = time.monotonic()
    found: list[Figure] = []
    why = ""
    try:
        found = step.measure(machine)
    except NotMeasured as err:
        why = str(err)
    return Measured(
        section=section.number,
        step=step.name,
        date=time.strftime("%Y-%m-%d"),
        elapsed_s=round(time.monotonic() - begun_s, 1),
        figures=found,
        not_measured=why,
    )


def table(plan: Plan, figures: Figures) -> str:
    """Return the table, and below it what is wrong, what gave nothing, and what is left."""
    rows, below = [], []
    for section, step in plan.steps():
        done = figures.of(section.number, step.name)
        name = f"{section.number} {step.name}"
        if done is None:
            why = figures.why_not(section.number, step.name)
            below.append(f"not measured: {name}: {why}" if why else f"left: {name}")
            continue
        rows += [[name, each.name, _value(each)] for each in done.figures]
        below += [f"WRONG: {name}: {each}" for each in done.wrong]
    shown = tabulate(
        rows, headers=["step", "figure", "value"], tablefmt="github", disable_numparse=True
    )
    return "\n".join([title(figures), "", shown, "", *below]).rstrip()


def exit_code(plan: Plan, figures: Figures) -> int:
    """Return 1 if a result is wrong, 3 if one is missing, else 0."""
    done = [figures.of(section.number, step.name) for section, step in plan.steps()]
    if any(each.wrong for each in done if each):
        return 1
    return 3 if None in done else 0


def _value(figure: Figure) -> str:
    text = f"{figure.value} {figure.unit}".strip()
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def title(figures: Figures) -> str:
    """Return what the figures are of, in a line."""
    facts = figures.facts
    devices = f"{len(facts.devices)} x {facts.model}" if facts.devices else facts.model
    driver = f", driver {facts.driver}" if facts.driver else ""
    little = ", a little of everything" if figures.small else ""
    return f"{devices}{driver}, torch {facts.torch}, {facts.collective_library}{little}"


def would_do(plan: Plan) -> str:
    """Return what the steps would do, section by section."""
    lines = ["There is no GPU here. With one, this would be done:"]
    for section in plan.sections:
        lines += ["", f"{section.number} {section.title}"]
        lines += [f"    {step.name}: {step.does}" for step in section.steps(plan.amount)]
    minutes = sum(step.takes_s for _, step in plan.steps()) / 60
    return "\n".join([*lines, "", f"It would take about {minutes:.0f} minutes."])
