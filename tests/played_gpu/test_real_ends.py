# SPDX-License-Identifier: Apache-2.0
"""What is said of real processes that end by an error of their device, or by a mistake on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.records.script_records import Diagnosed
from slurm_health.training.diagnosis.chain import InferenceChain
from slurm_health.training.diagnosis.collected import Collected, ScriptEnd
from slurm_health.training.diagnosis.diagnostician import Diagnostician, observe_failure
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.training_log import read_log
from tests.played_gpu.description import Device, Fault, machine, strike, write
from tests.played_gpu.running import Ended, run

pytestmark = [pytest.mark.played_gpu, pytest.mark.timeout(600)]
FOR_EVER = "1000000"


def told(ended: Ended) -> Diagnosed:
    """Return what a post-mortem says of a program on the one node of its job."""
    end = ScriptEnd(
        exit_code=ended.status if ended.status >= 0 else 128 - ended.status,
        signal=max(0, -ended.status),
        nodes=("n1",),
    )
    data = Collected([end, read_log([("out", ended.output + ended.errors)])])
    found = Diagnostician(observe_failure, InferenceChain(OPERATORS)).diagnose(data).diagnosed
    assert found is not None, ended.errors
    return found


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    device = Device(memory_bytes=1 << 30, tflops=0.01)
    write(tmp_path / "gpus", machine(1, device, seed=str(tmp_path)))
    return tmp_path / "gpus"


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault(device=0, kind="open_error", value=802), "gpu-fabric"),
        (Fault(device=0, kind="sticky_error", value=214, after=20), "gpu-broken"),
        (Fault(device=0, kind="sticky_error", value=700, after=20), "illegal-access"),
        (Fault(device=0, kind="sticky_error", value=710, after=20), "device-assert"),
        (Fault(device=0, kind="sticky_error", value=719, after=20), "launch-failure"),
    ],
    ids=lambda value: f"{value.value}" if isinstance(value, Fault) else "",
)
def test_an_error_of_a_device_is_told_by_what_its_process_said(
    played_python: Path, gpu: Path, fault: Fault, cause: str
) -> None:
    strike(gpu, fault)

    found = told(run(played_python, "mistakes", ["none", FOR_EVER], gpus=gpu))

    assert found.cause == cause


def test_too_much_memory_of_a_device_is_its_users_mistake(played_python: Path, gpu: Path) -> None:
    found = told(run(played_python, "mistakes", ["too-much", "1"], gpus=gpu))

    assert (found.cause, found.attribution) == ("gpu-out-of-memory", "user error")
    assert found.accused == []
