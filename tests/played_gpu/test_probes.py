# SPDX-License-Identifier: Apache-2.0
"""The probes of one device, on played ones: what they measure, and what they find."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.played_gpu.description import Device, Fault, machine, strike, write
from tests.played_gpu.running import environment, run

pytestmark = [pytest.mark.played_gpu, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SMALL = ("copy_bytes=4194304", "pattern_bytes=8388608")


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    write(tmp_path / "gpus", machine(2, Device(memory_bytes=1 << 30), seed=str(tmp_path)))
    return tmp_path / "gpus"


def probed(python: Path, gpus: Path, name: str, *options: str) -> dict[str, Any]:
    ended = run(
        python,
        "probe",
        [name, "1", *(options or SMALL)],
        gpus=gpus,
        variables={"PYTHONPATH": str(ROOT)},
    )
    assert ended.status == 0, ended.errors
    found: dict[str, Any] = json.loads(ended.output)
    return found


@pytest.mark.slow
def test_little_free_memory_is_tested_too(played_python: Path, gpus: Path) -> None:
    strike(gpus, Fault(device=1, kind="memory_used", value=600 * MIB))
    (sample,) = probed(played_python, gpus, "memory_pattern", "pattern_bytes=1073741824")["samples"]
    assert 64 * MIB <= sample["figures"]["bytes"] <= 106 * MIB


@pytest.mark.parametrize("arrays", [1, 17, 18])
def test_one_wrong_bit_in_memory_is_found_and_its_device_named(
    played_python: Path, gpus: Path, arrays: int
) -> None:
    strike(gpus, Fault(device=1, kind="wrong_memory", value=arrays))
    found = probed(played_python, gpus, "memory_pattern")
    assert found["raised"] == "WrongResults"
    assert found["said"].startswith("memory of device 1 does not give back what was written: 1 of")


@pytest.mark.slow
def test_data_that_changes_on_its_way_is_found(played_python: Path, gpus: Path) -> None:
    strike(gpus, Fault(device=1, kind="wrong_memory", value=1))
    found = probed(played_python, gpus, "host_copy")
    assert found["raised"] == "WrongResults"
    assert "changed on its way from the host to device 1: 1 of" in found["said"]


def test_an_nvlink_domain_is_told_only_where_it_reaches_beyond_the_node(
    played_python: Path, gpus: Path
) -> None:
    """One device is on a node by itself, one in a clique of a rack, and one has not joined yet."""
    write(gpus, machine(3, Device(memory_bytes=1 << 30), seed=str(gpus)))
    rack = [Fault(device=number, kind="fabric_cluster", value=7) for number in (1, 2)]
    strike(
        gpus,
        *rack,
        Fault(device=1, kind="fabric_clique", value=3),
        Fault(device=2, kind="fabric_state", value=2),
    )
    ask = (
        "import torch; from slurm_health.preflight.probes.torch_device import nvlink_domain as of\n"
        "print([of(torch.device('cuda', number)) for number in range(3)])"
    )
    done = subprocess.run(
        [played_python, "-c", ask],
        env={**environment(gpus), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip() == "['', 'nvlink-07000000-0000-0000-0000-000000000000.3', '']", (
        done.stderr
    )
