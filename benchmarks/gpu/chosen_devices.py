# SPDX-License-Identifier: Apache-2.0
"""8: what the variables that choose devices do to the workers of a node."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.step import Amount, Figure, Section, Step
from slurm_health.preflight.agent.worker_process import Gone
from slurm_health.preflight.agent.workers import AgentSettings, Workers
from slurm_health.records.records import Record, WorkersFailed, WorkersReady

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
    said: list[Record] = []
    settings = AgentSettings(
        node="here",
        directory=Path(),
        run_id="",
        launch=0,
        python=machine.python,
        poll_s=1.0,
        silence_s=_LIMIT_S,
    )
    workers = Workers(
        settings,
        address="127.0.0.1",
        environ={**machine.environ, **environ},
        say=said.append,
        monotonic=time.monotonic,
    )
    try:
        workers.replace()
        give_up = time.monotonic() + _LIMIT_S
        while not said and time.monotonic() < give_up:
            workers.wait(1.0)
            for worker, line in workers.lines():
                if isinstance(line, Gone):
                    return "".join(state.detail for state in worker.states.values()) or line.how
        match said:
            case [WorkersReady() as ready]:
                return f"{len(ready.devices)} ready with {ready.backend}"
            case [WorkersFailed() as failed]:
                return failed.reason
        return f"nothing within {_LIMIT_S:.0f} s"
    finally:
        workers.end()
