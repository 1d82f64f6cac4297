# SPDX-License-Identifier: Apache-2.0
"""The cases of `python -m benchmarks.check`: what is broken, which verdict is right, the target."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.check_measure import Fault, Sample, Stage, measure_check
from benchmarks.dlrover import Scene
from slurm_health.records.verdict import Level
from tests.lab import Lab

FAULTY = (Level.FAULTY,)
FOUND = (Level.SLOW, Level.FAULTY)
# An agent that is gone is no proof against its node: named, or well again, never another blamed.
NAMED = (Level.FAULTY, Level.INCONCLUSIVE)
ANY = tuple(Level)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table. Without `target_s` only the verdict is aimed at."""

    name: str
    title: str
    measure: Callable[[Stage], Sample]
    target_s: float | None = None
    dlrover: Scene | None = None

    @property
    def target(self) -> str:
        """What is aimed at, in words."""
        return "found" if self.target_s is None else f"≤ {duration(self.target_s)}"


def duration(seconds: float) -> str:
    """Return a time as the table shows it."""
    if abs(seconds) < 0.95:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.0f} s" if seconds == int(seconds) else f"{seconds:.1f} s"


def cases() -> tuple[Case, ...]:
    """Return the table, in order: the check with torch, then the light one."""
    return (
        *_checks(),
        *(_light(case) for case in _checks("light")),
    )


def _light(case: Case) -> Case:
    """Return a case by its name among those of the light check, which is to be faster."""
    target_s = 1.0 if case.name == "healthy-4" else case.target_s
    return replace(
        case,
        name=f"light-{case.name}",
        title=f"light: {case.title}",
        target_s=target_s,
        dlrover=None,
    )


def _checks(probes: str = "auto") -> tuple[Case, ...]:
    make = functools.partial(_check, probes=probes)
    return (
        make("healthy-4", "4 healthy nodes", target_s=3.5, dlrover=Scene(nodes=4)),
        make("healthy-6", "6 healthy nodes", 6, target_s=5, dlrover=Scene(nodes=6)),
        make("crash", "a check process crashes, each time, 1 of 4",
             fault=Fault(in_round=_crash, strikes=True), expected=FAULTY, target_s=5,
             dlrover=Scene(nodes=4, crashing=1)),
        make("hang", "a check process hangs, each time, 1 of 4",
             fault=Fault(in_round=_hang, strikes=True), expected=FAULTY, target_s=12),
        make("drop", "packets dropped, 1 of 4",
             fault=Fault(standing=_drop), expected=FAULTY, target_s=12),
        make("drop-3", "packets dropped, 1 of 3", 3,
             fault=Fault(standing=_drop), expected=FAULTY, target_s=12),
        make("agent-once", "an agent killed at work, once, 1 of 4",
             fault=Fault(in_round=_kill_agent, once=True, strikes=True), expected=ANY,
             target_s=30),
        make("agent-always", "an agent killed, each time, 1 of 4",
             fault=Fault(standing=_kill_every_agent, strikes=True), expected=NAMED,
             target_s=30),
        make("slow-link", "a link of 200 Mbit/s, 1 of 4",
             fault=Fault(standing=_slow_link), expected=FOUND, target_s=8),
        make("slow-cpu", "a fifth of one core, 1 of 4",
             fault=Fault(standing=_starve), expected=FOUND),
    )  # fmt: skip


def _check(
    name: str,
    title: str,
    nodes: int = 4,
    *,
    fault: Fault | None = None,
    expected: Sequence[Level] = (Level.HEALTHY,),
    target_s: float | None = None,
    dlrover: Scene | None = None,
    probes: str = "auto",
) -> Case:
    def measure(stage: Stage) -> Sample:
        return measure_check(stage, nodes, fault or Fault(), expected, probes)

    return Case(name=name, title=title, measure=measure, target_s=target_s, dlrover=dlrover)


def _crash(lab: Lab, node: str) -> None:
    lab.fault.crash_workers_now(node)


def _hang(lab: Lab, node: str) -> None:
    lab.fault.stop_workers_now(node)


def _drop(lab: Lab, node: str) -> None:
    lab.fault.drop(node)


def _kill_agent(lab: Lab, node: str) -> None:
    lab.fault.kill_agent(node)


def _kill_every_agent(lab: Lab, node: str) -> None:
    lab.fault.kill_agent(node, times=None)


def _slow_link(lab: Lab, node: str) -> None:
    lab.fault.slow_link(node, mbit=200)


def _starve(lab: Lab, node: str) -> None:
    lab.fault.starve_cpu(node, share=0.2)
