# SPDX-License-Identifier: Apache-2.0
"""Nodes with played GPUs: Slurm hands them out, NVML and the kernel's log tell of their faults."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.played_gpu import nvml_library
from tests.played_gpu.description import Fault

from . import Lab, LabError
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
    """What NVML tells a user of a node's GPUs."""
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


def test_a_gpu_that_vanishes_is_lost_to_nvml_and_told_by_its_own_kernel_only(lab: Lab) -> None:
    lab.fault.gpu_vanish("n1", 1)
    assert [each.get("lost", "") for each in gpus(lab, "n1")] == ["", "GPU is lost"]
    assert "NVRM: Xid (PCI:0000:21:00): 79, " in kernel_said(lab, "n1")
    assert "GPU has fallen off the bus." in kernel_said(lab, "n1")
    assert [each.get("lost", "") for each in gpus(lab, "n2")] == ["", ""]
    assert "Xid" not in kernel_said(lab, "n2")
    lab.fault.clear("n1")
    assert [each.get("lost", "") for each in gpus(lab, "n1")] == ["", ""]
    assert "Xid" not in kernel_said(lab, "n1")


def test_an_occupied_gpu_names_the_process_of_another_user(lab: Lab) -> None:
    lab.fault.gpu_occupied("n2", 0)
    (pid,) = gpus(lab, "n2")[0]["processes"]
    owner = lab.run(["stat", "-c", "%U %n", f"/proc/{pid}"], node="n2").stdout
    assert owner == f"bob /proc/{pid}\n"
    lab.fault.clear("n2")
    assert gpus(lab, "n2")[0]["processes"] == []
    assert lab.run(["test", "-e", f"/proc/{pid}"], node="n2", check=False).returncode == 1


def test_a_gpu_that_is_not_there_cannot_be_broken(lab: Lab) -> None:
    with pytest.raises(LabError, match="no GPU 2"):
        lab.fault.gpu_dead("n1", 2)


COMMANDS = {
    "gpu-dead": {"open_error", "nvml_error"},
    "gpu-vanish": {"off_bus"},
    "gpu-slow": {"slow"},
    "gpu-hot": {"throttle"},
    "gpu-lying": {"wrong_bit"},
    "gpu-ecc": {"sticky_error"},
    "gpu-hang": {"hang"},
    "gpu-divided": {"mig_mode"},
    "nccl-hang": {"nccl_init_hang"},
    "gpu-occupied": {"memory_used", "occupied_by"},
    "nvlink-down": {"nvlinks_down"},
    "slow-rail": {"link_slow"},
    "dead-rail": {"link_never"},
}


def test_every_fault_has_a_command_and_a_row_in_the_page_and_is_cleared(lab: Lab) -> None:
    command = [sys.executable, "-m", "tests.lab", "fault"]
    named = [f"--name={lab.spec.name}", "n1"]
    page = (CHECKOUT / "tests/lab/README.md").read_text()
    for kind, faults in COMMANDS.items():
        subprocess.run([*command, kind, *named, "1"], check=True, cwd=CHECKOUT)
        assert {(1, each) for each in faults} <= {
            (each.device, each.kind) for each in lab.fault.gpus_of("n1").faults
        }
        assert f"| `{kind} n3 1" in page
    subprocess.run([*command, "clear", *named], check=True, cwd=CHECKOUT)
    assert lab.fault.gpus_of("n1").faults == ()


def test_a_lab_without_gpus_says_so_when_one_is_to_be_broken() -> None:
    with Lab.start(nodes=1) as lab, pytest.raises(LabError, match="this lab has no GPUs"):
        lab.fault.gpu("n1", Fault(device=0, kind="off_bus"))
