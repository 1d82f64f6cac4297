# SPDX-License-Identifier: Apache-2.0
"""Everything that one GPU can show, over NCCL where several processes have to share it.

    python -m benchmarks.gpu                        all nine sections
    python -m benchmarks.gpu --only 2 --only 4
    python -m benchmarks.gpu --device cpu --small   that it runs, on a machine without a GPU

Each step is kept in a file as soon as it is done. A call begins no step that would not end within
its budget; the next call continues, and tries again what could not be measured. On a machine
without a GPU it only says what it would do. Exits 1 if a result is wrong, 3 if steps are left or
could not be measured, else 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.command import count, end_as_on_interrupt
from benchmarks.gpu import figures_file
from benchmarks.gpu.figures_file import Figures, Measured
from benchmarks.gpu.machine import Machine, Unusable, describe, find_python
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.step import SMALL, Amount, Figure, NotMeasured, Section, Step
from slurm_health.agent.node_facts import device_count

BUDGET_S = 540.0
DEFAULT_FILE = Path("gpu.json")
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


def main() -> int:
    """Measure what is left, print the table, return the exit code."""
    begun_s = time.monotonic()
    options = _parser().parse_args()
    end_as_on_interrupt()
    environ: Mapping[str, str] = os.environ
    wanted = [each for each in SECTIONS if not options.only or each.number in options.only]
    plan = Plan(sections=wanted, amount=SMALL if options.small else Amount())
    if options.device == "cpu":
        environ = {**environ, "CUDA_VISIBLE_DEVICES": ""}
    elif not device_count(environ):
        print(_would_do(plan))
        return 0
    try:
        machine = describe(options.python or find_python(environ), environ)
        figures = figures_file.read(options.output, machine.facts, small=options.small)
        print(_title(figures), file=sys.stderr)
        figures = _measure(plan, machine, figures, options.output, begun_s + options.budget)
    except Unusable as err:
        print(f"benchmarks.gpu: {err}", file=sys.stderr)
        return 3
    print(table(plan, figures))
    return exit_code(plan, figures)


def _measure(plan: Plan, machine: Machine, figures: Figures, output: Path, end_s: float) -> Figures:
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
    return "\n".join([_title(figures), "", shown, "", *below]).rstrip()


def exit_code(plan: Plan, figures: Figures) -> int:
    """Return 1 if a result is wrong, 3 if one is missing, else 0."""
    done = [figures.of(section.number, step.name) for section, step in plan.steps()]
    if any(each.wrong for each in done if each):
        return 1
    return 3 if None in done else 0


def _value(figure: Figure) -> str:
    text = f"{figure.value} {figure.unit}".strip()
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def _title(figures: Figures) -> str:
    facts = figures.facts
    devices = f"{len(facts.devices)} x {facts.model}" if facts.devices else facts.model
    driver = f", driver {facts.driver}" if facts.driver else ""
    little = ", a little of everything" if figures.small else ""
    return f"{devices}{driver}, torch {facts.torch}, {facts.collective_library}{little}"


def _would_do(plan: Plan) -> str:
    lines = ["There is no GPU here. With one, this would be done:"]
    for section in plan.sections:
        lines += ["", f"{section.number} {section.title}"]
        lines += [f"    {step.name}: {step.does}" for step in section.steps(plan.amount)]
    minutes = sum(step.takes_s for _, step in plan.steps()) / 60
    return "\n".join([*lines, "", f"It would take about {minutes:.0f} minutes."])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Everything that one GPU can show.",
        epilog="; ".join(f"{each.number}: {each.title}" for each in SECTIONS),
    )
    numbers = [each.number for each in SECTIONS]
    parser.add_argument(
        "--only", action="append", type=int, choices=numbers, metavar="N", help="this section"
    )
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu", help="[gpu]")
    parser.add_argument(
        "--small", action="store_true", help="a little of everything, to see that it runs"
    )
    parser.add_argument(
        "--budget", type=count, default=BUDGET_S, metavar="SECONDS", help="of this call [540]"
    )
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_FILE, metavar="FILE", help="[gpu.json]"
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="that has torch [python3 on the PATH or this one, first one built for GPUs]",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
