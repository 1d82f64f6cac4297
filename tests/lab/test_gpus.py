# SPDX-License-Identifier: Apache-2.0
"""Nodes with played GPUs: Slurm hands them out, NVML and the kernel's log tell of their faults."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.played_gpu import nvml_library

from . import Lab
from .layout import CHECKOUT

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(nvml_library.missing() is not None, reason=nvml_library.missing() or ""),
]

ASK = """
import msgspec
from slurm_health.system.nvml import read_gpus
print(msgspec.json.encode(read_gpus()).decode())
"""


@pytest.fixture(scope="module")
def module_lab() -> Iterator[Lab]:
    with Lab.start(nodes=2, gpus=2) as lab:
        yield lab


def gpus(lab: Lab, node: str, user: str = "alice") -> list[dict[str, Any]]:
    asked = lab.run([sys.executable, "-c", ASK], node=node, user=user, cwd=CHECKOUT)
    devices: list[dict[str, Any]] = json.loads(asked.stdout)["devices"]
    return devices


def kernel_said(lab: Lab, node: str) -> str:
    return lab.run(["cat", "/dev/kmsg"], node=node).stdout


def test_slurm_hands_out_each_gpu_once(lab: Lab) -> None:
    options = ["-N2", "--ntasks-per-node=2", "--gpus-per-task=1", "--gpu-bind=single:1"]
    words = ["sh", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"]
    seen = lab.run(["srun", *options, *words], user="alice")
    assert sorted(seen.stdout.split("\n")[:-1]) == ["n1 0", "n1 1", "n2 0", "n2 1"]


def test_each_node_has_gpus_of_its_own_and_the_login_node_none(lab: Lab) -> None:
    uuids = {each["uuid"] for node in lab.nodes for each in gpus(lab, node)}
    assert len(uuids) == 4
    assert lab.run(["ls", "/run/played-gpus"]).stdout == ""
    assert lab.run(["test", "-c", "/dev/nvidia1"], node="n1").returncode == 0
    assert lab.run(["test", "-e", "/dev/nvidia0"], check=False).returncode == 1


def test_a_gpu_that_vanishes_is_told_by_its_own_kernel_only_until_it_is_mended(lab: Lab) -> None:
    lab.fault.gpu_vanish("n1", 1)
    assert [each.get("lost", "") for each in gpus(lab, "n1")] == ["", "GPU is lost"]
    assert "NVRM: Xid (PCI:0000:21:00): 79, " in kernel_said(lab, "n1")
    assert "Xid" not in kernel_said(lab, "n2")
    lab.fault.clear("n1")
    assert [each.get("lost", "") for each in gpus(lab, "n1")] == ["", ""]
    assert "Xid" not in kernel_said(lab, "n1")
