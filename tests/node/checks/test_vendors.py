# SPDX-License-Identifier: Apache-2.0
"""What vendors' tools report: drives, the board, AMD's GPUs."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_health.node.checks.check import CheckContext, check_type
from slurm_health.node.checks.vendors import AmdGpus, Bmc, Nvme
from slurm_health.node.hooks.init_config import draft
from slurm_health.node.rules.finding import Remedy, Status
from slurm_health.records.errors import Unmeasured
from tests.node.checks.conftest import WELL, find_out, printing
from tests.support.rows import rows
from tests.support.sites import tree
from tests.support.supervised import write_executable


def drives_of(drives: dict[str, str]) -> dict[str, str]:
    """Return the files of drives and their states, and of one over the network, not the node's."""
    files = {f"/sys/class/nvme/{drive}/transport": "pcie\n" for drive in drives}
    files |= {f"/sys/class/nvme/{drive}/state": f"{state}\n" for drive, state in drives.items()}
    return files | {"/sys/class/nvme/nvme9/transport": "tcp\n"}


@rows
def test_what_a_vendors_tool_reports_is_found(
    tmp_path: Path,
    check: str,
    settings: dict[str, Any],
    drives: dict[str, str],
    context: str,
    returned_uptime_s: float,
    answers: dict[str, str],
    code: int,
    finds: Status,
    text: str,
) -> None:
    uptime = {"/proc/sys/kernel/random/boot_id": "b-1\n", "/proc/uptime": "90000.00 0.00\n"}
    machine = tree(tmp_path / "machine", drives_of(drives) | uptime)
    machine = msgspec.structs.replace(
        machine,
        state=tmp_path / "state",
        context=context or machine.context,
        returned_uptime_s=returned_uptime_s,
    )
    program = printing(tmp_path, check, answers, code)

    found = find_out(msgspec.convert({**settings, "program": program}, check_type(check)), machine)

    assert (found.status, found.text) == (finds, text.replace("DIR", str(tmp_path)))
    assert "GPU 1 has" not in text or found.remedy is Remedy.REBOOT


def test_blocks_that_were_lost_since_the_last_run_are_a_warning(tmp_path: Path) -> None:
    machine = tree(tmp_path / "machine", {**WELL, **drives_of({"nvme0": "live"})})
    machine = msgspec.structs.replace(machine, state=tmp_path / "state")
    for errors, status, text in ((12, Status.PASS, "healthy"), (15, Status.WARN, "3 blocks could")):
        log = json.dumps({"critical_warning": 0, "avail_spare": 9, "media_errors": errors})
        found = find_out(Nvme(program=printing(tmp_path, "nvme", {"/dev/nvme0": log})), machine)
        assert found.status is status
        assert text in found.text


@pytest.mark.skipif(not shutil.which("ipmitool"), reason="ipmitool is not installed")
@pytest.mark.skipif(Path("/dev/ipmi0").exists(), reason="this machine has a BMC")
def test_the_real_ipmitool_without_a_bmc_is_not_measured() -> None:
    with pytest.raises(Unmeasured, match="ipmitool sel elist last 100: Could not open"):
        Bmc().measure(CheckContext())


@pytest.mark.parametrize("text", ["", "{", "[1, 2", '{"a": "b"}', "[]", "null", '{"gpu_data": 3}'])
def test_output_that_means_nothing_convicts_nobody(tmp_path: Path, text: str) -> None:
    machine = tree(tmp_path / "machine", drives_of({"nvme0": "live"}))
    nvme = Nvme(program=printing(tmp_path, "nvme", {"/dev/nvme0": text}))
    assert find_out(nvme, machine).status is Status.INCONCLUSIVE
    for check in (
        AmdGpus(program=printing(tmp_path, "amd-smi", {"metric --json": text, "topology": text})),
        Bmc(program=printing(tmp_path, "ipmitool", {"sel": text})),
        AmdGpus(program="/no/amd-smi"),
        Bmc(program="/no/ipmitool"),
    ):
        assert find_out(check, CheckContext()).status in {Status.INCONCLUSIVE, Status.PASS}


def test_only_what_the_machine_has_is_drafted(tmp_path: Path) -> None:
    titles = ("[checks.nvme]", "[checks.bmc]", "[checks.amd-gpu]", "[checks.dcgm]")
    bare = tree(tmp_path / "bare", {"/proc/meminfo": ""})
    assert not [title for title in titles if title in draft(bare, node="n1")[0]]
    files = {"/sys/class/nvme/nvme0/transport": "pcie\n", "/dev/ipmi0": ""}
    full = tree(tmp_path / "full", files)
    for name in ("nvme", "ipmitool", "dcgmi"):
        (tmp_path / "full/usr/bin").mkdir(parents=True, exist_ok=True)
        write_executable(tmp_path / "full/usr/bin" / name, "#!/bin/sh\n")

    text, _ = draft(full, node="n1")

    assert "[checks.nvme]\ncount = 1\nshadow = true\n" in text
    assert "[checks.dcgm]\nlevel = 2\ntime_limit_s = 300\nshadow = true\n" in text
    assert "[checks.bmc]\ntime_limit_s = 40\nshadow = true\n" in text
