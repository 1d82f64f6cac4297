# SPDX-License-Identifier: Apache-2.0
"""What the checks that ask a vendor's tool have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.node.checks.check import Check, CheckContext, find_check
from slurm_health.node.checks.vendors import AmdGpus, Bmc, Nvme, Optics
from slurm_health.node.hooks.init_config import draft
from slurm_health.node.rules.finding import Status
from slurm_health.records.errors import Unmeasured
from tests.node.checks.conftest import find_out, printing
from tests.support.sites import tree
from tests.support.supervised import write_executable


@pytest.mark.parametrize(
    "check", [Bmc(program="/no/ipmitool"), AmdGpus(program="/no/amd-smi")], ids=["bmc", "amd"]
)
def test_a_tool_that_is_absent_is_no_fault(check: Check) -> None:
    with pytest.raises(Unmeasured, match="not found or not executable"):
        check.measure(CheckContext())


@pytest.mark.parametrize("text", ["", "{", "[1, 2", '{"a": "b"}', "[]", "null", '{"gpu_data": 3}'])
def test_output_that_means_nothing_convicts_nobody(tmp_path: Path, text: str) -> None:
    for check in (
        AmdGpus(program=printing(tmp_path, "amd-smi", {"metric --json": text, "topology": text})),
        Optics(devices=("m",), mlxlink=printing(tmp_path, "mlxlink", {"-d m": text})),
        Bmc(program=printing(tmp_path, "ipmitool", {"sdr": text, "sel": text})),
    ):
        try:
            found = find_out(check, CheckContext())
        except Unmeasured:
            continue
        assert found.status in {Status.INCONCLUSIVE, Status.PASS}


def test_only_what_the_machine_has_is_drafted(tmp_path: Path) -> None:
    titles = ("[checks.nvme]", "[checks.bmc]", "[checks.optics]", "[checks.amd-gpu]")
    bare = tree(tmp_path / "bare", {"/proc/meminfo": ""})
    assert not [title for title in titles if title in draft(bare, node="n1")[0]]
    files = {"/sys/class/nvme/nvme0/transport": "pcie\n", "/dev/ipmi0": ""}
    full = tree(tmp_path / "full", files)
    for name in ("smartctl", "ipmitool"):
        (tmp_path / "full/usr/bin").mkdir(parents=True, exist_ok=True)
        write_executable(tmp_path / "full/usr/bin" / name, "#!/bin/sh\n")

    text, _ = draft(full, node="n1")

    assert "[checks.nvme]\ncount = 1\nshadow = true\n" in text
    assert "[checks.bmc]\ntime_limit_s = 40\nshadow = true\n" in text


@pytest.mark.parametrize(
    ("name", "kind"),
    [("amd-gpu", AmdGpus), ("bmc", Bmc), ("nvme", Nvme), ("optics", Optics)],
)
def test_each_is_found_by_its_name(name: str, kind: type[Check]) -> None:
    assert find_check(name) is kind
