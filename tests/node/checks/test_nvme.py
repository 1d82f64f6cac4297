# SPDX-License-Identifier: Apache-2.0
"""What drives tell of themselves, in the forms that smartctl and nvme-cli print."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from slurm_health.node.checks.vendors import Nvme
from slurm_health.node.rules.finding import Finding, Status
from tests.node.checks.conftest import find_out, printing
from tests.support.sites import tree

NODE, WARN, OPEN = Status.NODE_FAULT, Status.WARN, Status.INCONCLUSIVE


def smart_log(**changes: int) -> dict[str, int]:
    log = {"critical_warning": 0, "temperature": 41, "available_spare": 100, "percentage_used": 3}
    return {**log, "media_errors": 0, **changes}


def ask_nvme(tmp_path: Path, check: Nvme, logs: dict[str, str], name: str = "smartctl") -> Finding:
    program = printing(tmp_path, name, {f"/dev/{drive}": log for drive, log in logs.items()})
    files = {f"/sys/class/nvme/{drive}/transport": "pcie\n" for drive in logs}
    files |= {f"/sys/class/nvme/{drive}/state": "live\n" for drive in logs}
    # A drive over the network is none of the node's own.
    files["/sys/class/nvme/nvme9/transport"] = "tcp\n"
    files["/proc/sys/kernel/random/boot_id"] = "b-1\n"
    context = tree(tmp_path / "machine", files)
    context = msgspec.structs.replace(context, state=tmp_path / "state")
    return find_out(msgspec.structs.replace(check, program=program), context)


def of_smartctl(**changes: int) -> str:
    body = {
        "smartctl": {"exit_status": 0},
        "nvme_smart_health_information_log": smart_log(**changes),
    }
    return json.dumps(body)


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({}, Status.PASS, "2 NVMe drives healthy"),
        ({"critical_warning": 0x08}, NODE, "nvme0: it can only be read"),
        ({"critical_warning": 0x04}, NODE, "nvme0: its reliability is degraded"),
        ({"critical_warning": 0x01}, WARN, "nvme0: its spare blocks are used up"),
        ({"critical_warning": 0x02}, WARN, "nvme0: it is too hot or too cold"),
        ({"percentage_used": 104}, WARN, "nvme0: 104 % of its life are used, limit 100"),
        ({"media_errors": 12}, Status.PASS, "2 NVMe drives healthy"),  # of times gone by
    ],
)
def test_a_drive_is_judged_by_its_own_log(
    tmp_path: Path, changes: dict[str, int], status: Status, said: str
) -> None:
    logs = {"nvme0": of_smartctl(**changes), "nvme1": of_smartctl()}

    found = ask_nvme(tmp_path, Nvme(count=2), logs)

    assert (found.status, found.text) == (status, said)


def test_blocks_that_were_lost_since_the_last_run_are_a_warning(tmp_path: Path) -> None:
    ask_nvme(tmp_path, Nvme(), {"nvme0": of_smartctl(media_errors=12)})

    found = ask_nvme(tmp_path, Nvme(), {"nvme0": of_smartctl(media_errors=15)})

    assert found.status is WARN
    assert "nvme0: 3 blocks could not be read since the last check" in found.text


def test_a_drive_that_is_gone_or_that_the_kernel_gave_up_is_a_fault(tmp_path: Path) -> None:
    missing = ask_nvme(tmp_path, Nvme(count=2), {"nvme0": of_smartctl()})
    dead = tree(tmp_path / "dead", {"/sys/class/nvme/nvme0/state": "dead\n"})

    assert (missing.status, missing.text) == (NODE, "1 NVMe drive, expected 2")
    assert find_out(Nvme(), dead).text == "nvme0: the kernel has given it up"


@pytest.mark.parametrize("warning", ["4", '{"value": 4, "available_spare": 0}'])
def test_the_log_is_read_as_nvme_cli_prints_it_too(tmp_path: Path, warning: str) -> None:
    text = f'{{"critical_warning": {warning}, "avail_spare": 100, "percent_used": 101}}'

    found = ask_nvme(tmp_path, Nvme(), {"nvme0": text}, name="nvme")

    assert (found.status, found.text) == (NODE, "nvme0: its reliability is degraded")


def test_a_drive_that_cannot_be_asked_is_not_measured(tmp_path: Path) -> None:
    refused = {"smartctl": {"messages": [{"string": "open device: failed", "severity": "error"}]}}

    found = ask_nvme(tmp_path, Nvme(count=1), {"nvme0": json.dumps(refused)})
    silent = ask_nvme(tmp_path, Nvme(), {"nvme0": "Segmentation fault"})

    assert (found.status, found.text) == (OPEN, "nvme0: open device: failed")
    assert (silent.status, silent.text) == (OPEN, "nvme0: Segmentation fault")


@pytest.mark.skipif(not shutil.which("smartctl"), reason="smartctl is not installed")
def test_the_real_smartctl_without_the_drive_is_not_measured(tmp_path: Path) -> None:
    context = tree(tmp_path, {"/sys/class/nvme/nvme99/transport": "pcie\n"})

    found = find_out(Nvme(program=str(shutil.which("smartctl"))), context)

    assert found.status is OPEN
    assert "nvme99" in found.text
    assert "failed" in found.text


@pytest.mark.parametrize("text", ["", "{", "[1, 2", '{"a": "b"}', "[]", "null", '{"gpu_data": 3}'])
def test_a_log_that_means_nothing_convicts_no_drive(tmp_path: Path, text: str) -> None:
    assert ask_nvme(tmp_path, Nvme(), {"nvme0": text}).status is OPEN
