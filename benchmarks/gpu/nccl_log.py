# SPDX-License-Identifier: Apache-2.0
"""9: whether NCCL's log gets in anybody's way, and what it says of the transport."""

from __future__ import annotations

import re
from functools import partial

from benchmarks.gpu import partner_death
from benchmarks.gpu.check_local import Course, Fault, check_local
from benchmarks.gpu.group_cycles import run_cycles
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.step import Amount, Figure, Section, Step

# The last makes torch speak as much, which is also to be heard where there is no NCCL.
NOISE = {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"}
_CYCLES = 2
_NODES = 2
_TRANSPORT = re.compile(r" via ([A-Z][\w/]*)")
_VERSION = re.compile(r"NCCL version (\S+)")


def steps(_: Amount) -> list[Step]:
    """Return a step for a process group, and one for each kind of check."""
    group = Step(
        name="process group",
        does="form a group with NCCL_DEBUG=INFO; read version and transport in its log",
        takes_s=60.0,
        measure=_group,
    )
    checks = [
        Step(
            name=f"check, {fault.value}",
            does=f"check this machine as {_NODES} nodes with NCCL's log, {fault.value}",
            takes_s=90.0,
            measure=partial(_check, fault),
        )
        for fault in (Fault.NONE, Fault.KILLED)
    ]
    return [group, *checks]


SECTION = Section(number=9, title="NCCL_DEBUG=INFO", steps=steps)


def _group(machine: Machine) -> list[Figure]:
    _, log = run_cycles(machine, _CYCLES, NOISE)
    return in_log(log)


def in_log(log: str) -> list[Figure]:
    """Return what is of interest in what a process printed."""
    version = _VERSION.search(log)
    transports = sorted(set(_TRANSPORT.findall(log)))
    return [
        Figure(name="lines", value=len(log.splitlines())),
        Figure(name="version", value=version[1] if version else "none named"),
        Figure(name="transport", value=", ".join(transports) or "none named"),
    ]


def _check(fault: Fault, machine: Machine) -> list[Figure]:
    course = check_local(machine, _NODES, fault, environ=NOISE)
    shared = machine.shares_devices(_NODES)
    return [*partner_death.figures(course, fault, shared=shared), _words(course)]


def _words(course: Course) -> Figure:
    """Return whether the log has got into what a check says."""
    said = [*course.details, *(each.reason for each in course.verdicts.values())]
    mixed = [text for text in said if "NCCL INFO" in text]
    wrong = f"with lines of the log: {mixed[0][:200]}" if mixed else ""
    return Figure(name="what nodes said", value=len(said), unit="texts", wrong=wrong)
