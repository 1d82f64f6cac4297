# SPDX-License-Identifier: Apache-2.0
"""What vendors' tools report: drives, the board, AMD's GPUs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.vendors import AmdGpus, Bmc, Nvme
from slurm_health.node.hooks.init_config import draft
from slurm_health.node.rules.finding import Finding, Remedy, Status
from slurm_health.records.errors import Unmeasured
from tests.cases import cases
from tests.node.checks.conftest import find_out, printing
from tests.support.sites import tree
from tests.support.supervised import write_executable

NODE, WARN, OPEN = Status.NODE_FAULT, Status.WARN, Status.INCONCLUSIVE


def smart_log(**changes: int) -> str:
    log = {"critical_warning": 0, "temperature": 314, "avail_spare": 100, "percent_used": 3}
    return json.dumps({**log, "media_errors": 0, **changes})


def ask_nvme(tmp_path: Path, check: Nvme, logs: dict[str, str]) -> Finding:
    program = printing(tmp_path, "nvme", {f"/dev/{drive}": log for drive, log in logs.items()})
    files = {f"/sys/class/nvme/{drive}/transport": "pcie\n" for drive in logs}
    files |= {f"/sys/class/nvme/{drive}/state": "live\n" for drive in logs}
    # A drive over the network is none of the node's own.
    files["/sys/class/nvme/nvme9/transport"] = "tcp\n"
    files["/proc/sys/kernel/random/boot_id"] = "b-1\n"
    context = tree(tmp_path / "machine", files)
    context = msgspec.structs.replace(context, state=tmp_path / "state")
    return find_out(msgspec.structs.replace(check, program=program), context)


@cases("node/checks/vendors.toml")
def test_a_drive_is_judged_by_its_own_log(
    tmp_path: Path, changes: dict[str, int], status: Status, said: str
) -> None:
    logs = {"nvme0": smart_log(**changes), "nvme1": smart_log()}

    found = ask_nvme(tmp_path, Nvme(count=2), logs)

    assert (found.status, found.text) == (status, said)


def test_blocks_that_were_lost_since_the_last_run_are_a_warning(tmp_path: Path) -> None:
    ask_nvme(tmp_path, Nvme(), {"nvme0": smart_log(media_errors=12)})

    found = ask_nvme(tmp_path, Nvme(), {"nvme0": smart_log(media_errors=15)})

    assert found.status is WARN
    assert "nvme0: 3 blocks could not be read since the last check" in found.text


def test_a_drive_that_is_gone_or_that_the_kernel_gave_up_is_a_fault(tmp_path: Path) -> None:
    missing = ask_nvme(tmp_path, Nvme(count=2), {"nvme0": smart_log()})
    dead = tree(tmp_path / "dead", {"/sys/class/nvme/nvme0/state": "dead\n"})

    assert (missing.status, missing.text) == (NODE, "1 NVMe drive, expected 2")
    assert find_out(Nvme(), dead).text == "nvme0: the kernel has given it up"


@pytest.mark.parametrize("warning", ["4", '{"value": 4, "available_spare": 0}'])
def test_the_warning_is_read_as_newer_releases_print_it_too(tmp_path: Path, warning: str) -> None:
    text = f'{{"critical_warning": {warning}, "avail_spare": 100, "percent_used": 101}}'

    found = ask_nvme(tmp_path, Nvme(), {"nvme0": text})

    assert (found.status, found.text) == (NODE, "nvme0: its reliability is degraded")


# --- the board, by ipmitool -----------------------------------------------------------------------


EVENTS = "   1 | 11/20/26 | 09:00:00 UTC | Power Supply PS1 | Presence detected | Asserted\n"
NOW = "11/24/26 07:00:00 UTC\n"
UNCORRECTABLE = "   7 | 11/24/26 | {time} UTC | Memory DIMM_B2 | Uncorrectable ECC | Asserted\n"


def ask_bmc(
    tmp_path: Path,
    events: str = EVENTS,
    now: str = NOW,
    place: CheckContext | None = None,
) -> Finding:
    answers = {"sel elist": events, "sel time": now}
    program = printing(tmp_path, "ipmitool", answers)
    return find_out(Bmc(program=program), place or CheckContext())


@cases("node/checks/vendors.toml")
def test_an_uncorrectable_memory_error_counts_while_it_is_new_by_the_clock_of_the_bmc(
    tmp_path: Path, time: str, now: str, status: Status
) -> None:
    found = ask_bmc(tmp_path, UNCORRECTABLE.format(time=time), now)

    assert found.status is status


@pytest.mark.parametrize(("returned_s", "status"), [(600, Status.PASS), (3600, NODE)])
def test_a_memory_error_from_before_a_person_returned_the_node_counts_no_more(
    tmp_path: Path, returned_s: float, status: Status
) -> None:
    files = {"proc/sys/kernel/random/boot_id": "b\n", "proc/uptime": "90000.00 0.00\n"}
    place = tree(tmp_path / "machine", files)
    place = msgspec.structs.replace(place, returned_uptime_s=90_000.0 - returned_s)
    error = UNCORRECTABLE.format(time="06:30:00")
    found = ask_bmc(tmp_path, error, place=place)

    assert found.status is status


@cases("node/checks/vendors.toml")
def test_other_lines_of_the_log_convict_nobody(tmp_path: Path, line: str, status: Status) -> None:
    found = ask_bmc(tmp_path, line)

    assert found.status is status


@pytest.mark.skipif(not shutil.which("ipmitool"), reason="ipmitool is not installed")
@pytest.mark.skipif(Path("/dev/ipmi0").exists(), reason="this machine has a BMC")
def test_the_real_ipmitool_without_a_bmc_is_not_measured() -> None:
    with pytest.raises(Unmeasured, match="ipmitool sel elist last 100: Could not open"):
        Bmc().measure(CheckContext())


# --- AMD's GPUs, by amd-smi -----------------------------------------------------------------------


def amd(number: int, **changes: object) -> dict[str, object]:
    throttle = {"prochot_violation_status": "NOT ACTIVE", "ppt_violation_status": "ACTIVE"}
    ecc = {"total_correctable_count": 4, "total_uncorrectable_count": 0}
    return {"gpu": number, "ecc": ecc, "throttle": throttle, **changes}


def links(number: int, shut: int | None = None) -> dict[str, object]:
    def link(other: int) -> dict[str, object]:
        kind = "SELF" if other == number else "XGMI"
        status = "DISABLED" if other == shut else "ENABLED"
        return {"gpu": other, "link_status": status, "link_type": kind}

    return {
        "gpu": number,
        "bdf": f"0000:0{number}:00.0",
        "links": [link(other) for other in range(3)],
    }


TOPOLOGY = json.dumps([links(number) for number in range(3)])


def ask_amd(tmp_path: Path, check: AmdGpus, metrics: object, topology: str = TOPOLOGY) -> Finding:
    answers = {"metric --json": json.dumps(metrics), "topology --json": topology}
    program = printing(tmp_path, "amd-smi", answers)
    return find_out(msgspec.structs.replace(check, program=program), CheckContext())


@pytest.mark.parametrize("wrap", [False, True])
def test_healthy_amd_gpus_pass_in_both_forms_of_output(tmp_path: Path, wrap: bool) -> None:
    gpus = [amd(number) for number in range(3)]
    metrics = {"gpu_data": gpus} if wrap else gpus

    found = ask_amd(tmp_path, AmdGpus(count=3), metrics)

    assert (found.status, found.text) == (Status.PASS, "3 AMD GPUs healthy")


@cases("node/checks/vendors.toml")
def test_an_amd_gpu_is_judged_by_what_it_says(
    tmp_path: Path, gpu: dict[str, object], status: Status, said: str
) -> None:
    found = ask_amd(tmp_path, AmdGpus(count=3), [amd(0), amd(1, **gpu), amd(2)])

    assert found.status is status
    assert said in found.text
    assert found.remedy is (Remedy.REBOOT if status is NODE else None)


def test_a_gpu_that_is_gone_and_an_xgmi_link_that_is_shut_are_faults(tmp_path: Path) -> None:
    two = ask_amd(tmp_path, AmdGpus(count=3), [amd(0), amd(1)])
    topology = json.dumps([links(0), links(1, shut=2), links(2)])
    shut = ask_amd(tmp_path, AmdGpus(), [amd(0), amd(1), amd(2)], topology)

    assert (two.status, two.text) == (NODE, "2 AMD GPUs, expected 3")
    assert (shut.status, shut.text) == (NODE, "GPU at 0000:01:00.0 has an XGMI link that is shut")


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[1, 2", '{"a": "b"}', "[]", "null", '{"gpu_data": 3}'])
def test_output_that_means_nothing_convicts_nobody(tmp_path: Path, text: str) -> None:
    assert ask_nvme(tmp_path, Nvme(), {"nvme0": text}).status is OPEN
    for check in (
        AmdGpus(program=printing(tmp_path, "amd-smi", {"metric --json": text, "topology": text})),
        Bmc(program=printing(tmp_path, "ipmitool", {"sel": text})),
        AmdGpus(program="/no/amd-smi"),
        Bmc(program="/no/ipmitool"),
    ):
        assert find_out(check, CheckContext()).status in {OPEN, Status.PASS}


def test_what_cannot_be_asked_or_counted_is_not_measured(tmp_path: Path) -> None:
    refused = ask_nvme(tmp_path, Nvme(count=1), {"nvme0": "open device: failed"})
    assert (refused.status, refused.text) == (OPEN, "nvme0: open device: failed")

    program = printing(tmp_path, "amd-smi", {"metric --json": json.dumps([amd(0)])})
    retest = CheckContext(context="retest")  # without a count, it returns no node
    assert find_out(AmdGpus(program=program), retest).status is OPEN


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
