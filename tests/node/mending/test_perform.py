# SPDX-License-Identifier: Apache-2.0
"""A step as it is taken: the GPUs that are reset, and a command that fails."""

from __future__ import annotations

import msgspec
import pytest

from slurm_health.node.mending import perform
from slurm_health.node.rules.mending import MendStep, StepOutcome, Tried
from slurm_health.system.nvml import GpuDevice, Gpus
from tests.support.hooked_node import Node
from tests.support.mended_node import begun


def gpus(**of_first: object) -> Gpus:
    first = GpuDevice(index=0, bus="00000000:3B:00.0", processes=())
    first = msgspec.structs.replace(first, **of_first)
    return Gpus(devices=(first, GpuDevice(index=1, bus="00000000:5E:00.0", processes=())))


def reset(node: Node, seen: Gpus, *devices: str, why_not: str = "") -> tuple[Tried, str]:
    trace = node.directory / "resets"
    node.more = f"[mend]\nreset = ['sh', '-c', 'echo $0 >>{trace}', '{{gpus}}']\n"
    found = perform.take(node.site, begun(), devices, why_not=lambda: why_not, look=lambda: seen)
    return found, trace.read_text() if trace.exists() else ""


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["0000:3b:00"], "00000000:3B:00.0\n"),
        (["00000000:5E:00.0"], "00000000:5E:00.0\n"),
        ([], "00000000:3B:00.0,00000000:5E:00.0\n"),
    ],
)
def test_the_gpus_at_fault_are_reset_or_all_where_they_are_not_known(
    node: Node, devices: list[str], expected: str
) -> None:
    found, trace = reset(node, gpus(), *devices)

    assert (found.outcome, trace) == (StepOutcome.DONE, expected)


@pytest.mark.parametrize(
    ("of_first", "why"),
    [
        ({"processes": (4711,)}, "GPU 0 is in use by PID 4711"),
        ({"processes": None}, "does not tell which processes use it"),
        ({"fabric_state": "in progress"}, "still joining the NVLink fabric"),
        ({"bus": "00000000:AA:00.0"}, "NVML shows no GPU at 0000:3b:00"),
    ],
)
def test_a_gpu_that_may_be_in_use_is_not_reset(
    node: Node, of_first: dict[str, object], why: str
) -> None:
    found, trace = reset(node, gpus(**of_first), "0000:3b:00")

    assert (found.outcome, trace) == (StepOutcome.FAILED, "")
    assert why in found.text


def test_a_person_who_was_quicker_keeps_the_step_from_being_taken(node: Node) -> None:
    found, trace = reset(node, gpus(), why_not="it is IDLE")

    assert (found.outcome, found.text, trace) == (StepOutcome.FAILED, "it is IDLE", "")


def test_a_command_that_fails_or_is_not_there_is_a_failed_step(node: Node) -> None:
    for argv, why in (
        ("['sh', '-c', 'echo busy; exit 3']", "sh ended with code 3: busy"),
        ("['/nowhere/x']", "/nowhere/x cannot be run: No such file or directory"),
    ):
        node.more = f"[mend]\nreload = {argv}\n"
        found = perform.take(node.site, begun(MendStep.RELOAD), (), why_not=lambda: "")
        assert (found.outcome, found.text) == (StepOutcome.FAILED, why)
