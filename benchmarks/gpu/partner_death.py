# SPDX-License-Identifier: Apache-2.0
"""2: whole checks of two and four played nodes, healthy and with a fault in a collective."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product

from benchmarks.gpu.check_local import VICTIM, Course, Fault, check_local
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.step import Amount, Figure, NotMeasured, Section, Step
from slurm_health.records.verdict import Level, NodeVerdict

# With fewer nodes nobody can tell which of two partners is to blame.
_LEAST_TO_CONVICT = 4
_DOES = {
    Fault.NONE: "nothing is broken",
    Fault.KILLED: "SIGKILL ends a worker in each of its rounds",
    Fault.STOPPED: "SIGSTOP stops a worker in each of its rounds",
    Fault.RAISES: "a worker raises after a collective in each of its rounds",
}


def steps(amount: Amount) -> list[Step]:
    """Return a step for each number of nodes and each fault."""
    return [
        Step(
            name=f"{nodes} nodes, {fault.value}",
            does=f"check this machine as {nodes} nodes over NCCL; {_DOES[fault]}",
            takes_s=90.0,
            measure=partial(_measured, nodes, fault),
        )
        for nodes, fault in product(amount.nodes, Fault)
    ]


SECTION = Section(number=2, title="death of a partner", steps=steps)


def _measured(nodes: int, fault: Fault, machine: Machine) -> list[Figure]:
    course = check_local(machine, nodes, fault)
    if fault is not Fault.NONE and not course.strikes:
        raise NotMeasured("the fault struck nobody: no worker came through a first collective")
    return figures(course, fault, shared=machine.shares_devices(nodes))


def figures(course: Course, fault: Fault, *, shared: bool) -> list[Figure]:
    """Return how a check went, beside whether its verdict is right."""
    levels = ", ".join(f"{node} {each.level.value}" for node, each in course.verdicts.items())
    found = [
        Figure(name="verdict", value=levels, wrong=wrong_in(course.verdicts, fault, shared=shared)),
        Figure(name="whole check", value=round(course.elapsed_s, 1), unit="s"),
    ]
    if fault is Fault.NONE:
        return found
    found.append(Figure(name="faults", value=course.strikes))
    if course.partner_s is not None:
        found.append(Figure(name="partner ended after", value=round(course.partner_s, 2), unit="s"))
        found.append(Figure(name="partner said", value=course.partner_said))
    return found


def wrong_in(verdicts: Mapping[str, NodeVerdict], fault: Fault, *, shared: bool) -> str:
    """Say what is wrong with a verdict; a node on a shared device may look slow."""
    harmless = {Level.HEALTHY, Level.INCONCLUSIVE} | ({Level.SLOW} if shared else set())
    victim = None if fault is Fault.NONE else VICTIM
    wrong = [
        f"{node} is {each.level.value} ({each.reason})"
        for node, each in verdicts.items()
        if node != victim and each.level not in harmless
    ]
    if victim is not None:
        found = verdicts[victim].level
        convictable = len(verdicts) >= _LEAST_TO_CONVICT
        right = {Level.FAULTY} if convictable else {Level.FAULTY, Level.INCONCLUSIVE}
        if found not in right:
            wrong.append(f"{victim} is {found.value}, though it was {fault.value} in each round")
    return "; ".join(wrong)
