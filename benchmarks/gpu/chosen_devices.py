# SPDX-License-Identifier: Apache-2.0
"""8: what the variables that choose devices do to the workers of a node."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.step import Amount, Figure, Section, Step
from slurm_health.preflight.agent.workers import Workers

_LIMIT_S = 120.0
_CUDA = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Variables, and a part of what the workers must then say."""

    name: str
    environ: Mapping[str, str]
    expected: str


def steps(amount: Amount) -> list[Step]:
    """Return the one step."""
    del amount
    does = (
        f"start workers with {_CUDA} as UUIDs, 0,1, empty and NoDevFiles, and with"
        " SLURM_GPUS_ON_NODE=8"
    )
    return [Step(name="five choices", does=does, takes_s=90.0, measure=_measured)]


SECTION = Section(number=8, title="choice of devices", steps=steps)


def cases(uuids: Sequence[str], torch: str) -> list[Case]:
    """Return what is tried on a machine with these devices, none where there are only CPUs."""
    count = len(uuids)
    unusable = f"accelerators were expected, but torch {torch}"
    few = f"2 {unusable} can use {count}"
    on_cpus = "1 ready with gloo"
    slurm = "8 ready" if count == 8 else f"Slurm gave the job 8 GPUs here, {count or 'none'} of"
    listed = ",".join(f"GPU-{uuid}" for uuid in uuids) or "GPU-00000000-0000-0000-0000-000000000000"
    return [
        Case(
            name="UUIDs",
            environ={_CUDA: listed},
            expected=f"{count} ready with nccl" if count else f"1 {unusable}",
        ),
        Case(
            name="0,1",
            environ={_CUDA: "0,1"},
            expected="2 ready with nccl" if count >= 2 else few if count else f"2 {unusable}",
        ),
        Case(name="empty", environ={_CUDA: ""}, expected=on_cpus),
        Case(name="NoDevFiles", environ={_CUDA: "NoDevFiles"}, expected=on_cpus),
        Case(
            name="SLURM_GPUS_ON_NODE=8",
            environ={"SLURM_GPUS_ON_NODE": "8"},
            expected=slurm if count <= 8 else f"{count} ready with nccl",
        ),
    ]


def _measured(machine: Machine) -> list[Figure]:
    uuids = [each.uuid for each in machine.facts.devices]
    return [_tried(machine, each) for each in cases(uuids, machine.facts.torch)]


def _tried(machine: Machine, case: Case) -> Figure:
    said = _first_words(machine, case.environ)
    wrong = "" if case.expected in said else f"expected: {case.expected}"
    return Figure(name=case.name, value=said, wrong=wrong)


def _first_words(machine: Machine, environ: Mapping[str, str]) -> str:
    """Return what the workers of a node say once they have started, or why they do not."""
    workers = Workers(
        python=machine.python,
        on_cpus=1,
        address="127.0.0.1",
        environ={**machine.environ, **environ},
        monotonic=time.monotonic,
    )
    try:
        workers.replace()
        obstacle = workers.start_due()
        give_up = time.monotonic() + _LIMIT_S
        while not obstacle and not workers.ready and time.monotonic() < give_up:
            workers.wait(1.0)
            obstacle = _heard(workers)
        if obstacle:
            return obstacle
        if not workers.ready:
            return f"nothing within {_LIMIT_S:.0f} s"
        return f"{len(workers)} ready with {workers.ready[0].backend}"
    finally:
        workers.end()


def _heard(workers: Workers) -> str:
    """Note which worker is ready; return how one ended, if one did."""
    for worker in workers:
        ended = worker.ended()  # before: what it said until then is read
        for event in worker.read_events():
            worker.hears_start(event)
        if ended is not None:
            return ended
    return ""
