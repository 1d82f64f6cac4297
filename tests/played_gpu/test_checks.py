# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check` on played GPUs: a well node passes, a broken one is named, no other is."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from slurm_health.system import journal
from tests.played_gpu.description import VARIABLE, Device, Fault, machine, strike, write
from tests.played_gpu.running import CRASHED
from tests.support.command_line import start

pytestmark = [pytest.mark.played_gpu, pytest.mark.timeout(600)]
LONGEST_S = 400
# So slow that a busy CPU that plays it is still faster: its times are the described ones.
DEVICE = Device(
    memory_bytes=4 << 30, tflops=0.002, memory_gb_per_s=8, link_gb_per_s=0.02, jitter=0.005
)
HEALTHY, BAD, INCONCLUSIVE = 0, 1, 3


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    write(tmp_path / "gpus", machine(4, DEVICE, seed=str(tmp_path)))
    return tmp_path / "gpus"


def check(
    python: Path, gpus: Path, *words: str, nodes: int
) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Check nodes of one device; return the exit code, what is concluded of each, and all words."""
    process = start(
        "check",
        f"--local={nodes}",
        "--json",
        f"--journal={gpus.parent / 'journal'}",
        f"--python={python}",
        *words,
        environ={
            VARIABLE: str(gpus),
            "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in range(nodes)),
            "OMP_NUM_THREADS": "1",
        },
    )
    try:
        stdout, stderr = process.communicate(timeout=LONGEST_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in stderr, stderr
    assert CRASHED not in stderr, stderr
    concluded = {node["node"]: node for node in json.loads(stdout)["nodes"]}
    return process.returncode, concluded, stdout + stderr


def levels(nodes: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: str(node["level"]) for name, node in nodes.items()}


@pytest.mark.parametrize(
    "checks", ["quick", "standard", "thorough", "network-check", "straggler-detection"]
)
def test_nodes_that_are_well_pass(played_python: Path, gpus: Path, checks: str) -> None:
    code, nodes, said = check(played_python, gpus, f"--check={checks}", nodes=2)
    assert levels(nodes) == {"local0": "healthy", "local1": "healthy"}, said
    assert code == HEALTHY
    (run,) = (gpus.parent / "journal").glob("local/*/0")
    assert journal.read_all(run, "local0")


@pytest.mark.parametrize(
    ("fault", "level"),
    [
        (Fault(device=2, kind="slow", value=0.55), "slow"),
        (Fault(device=2, kind="open_error", value=999), "faulty"),
        (Fault(device=2, kind="wrong_bit", value=2), "faulty"),
        (Fault(device=2, kind="sticky_error", value=214, after=3), "faulty"),
        (Fault(device=2, kind="off_bus", after=3), "faulty"),
        (Fault(device=2, kind="link_slow", value=0.005), "slow"),
        (Fault(device=2, kind="link_flip", value=1), "faulty"),
        (Fault(device=2, kind="strike_collective", value=signal.SIGKILL, after=1), "faulty"),
        (Fault(device=2, kind="hang", after=12), "faulty"),
        (Fault(device=2, kind="nccl_async_error", value=2, after=1), "faulty"),
        (Fault(device=2, kind="link_drop", after=1), "faulty"),
        (Fault(device=2, kind="nccl_init_hang"), "faulty"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
def test_a_broken_device_is_named_and_no_other(
    played_python: Path, gpus: Path, fault: Fault, level: str
) -> None:
    strike(gpus, fault)
    code, nodes, said = check(
        played_python, gpus, "--check=standard", "--round-deadline=60", nodes=4
    )
    assert nodes["local2"]["level"] == level, said
    assert {name for name, node in nodes.items() if node["level"] in {"faulty", "slow"}} == {
        "local2"
    }, said
    assert code == BAD
