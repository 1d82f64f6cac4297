# SPDX-License-Identifier: Apache-2.0
"""Xids in the kernel's log: which drain, which warn, and which say nothing of the node."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.kernel_log import Xid
from slurm_health.node.rules.finding import Finding, Status
from slurm_health.node.rules.kernel_lines import of_xid
from tests.node.checks.conftest import find_out
from tests.support.sites import tree


def xid(tmp_path: Path, number: int, bus: str = "PCI:0000:3b:00") -> CheckContext:
    line = f"3,9,9990000000,-;NVRM: Xid ({bus}): {number}, pid=77, name=python, text\n"
    return tree(tmp_path, {"/dev/kmsg": line, "/proc/uptime": "10000.0 1\n"})


@pytest.mark.parametrize("number", [46, 48, 62, 64, 74, 79, 95, 119, 120])
def test_hardware_xids_are_seen(tmp_path: Path, number: int) -> None:
    check = Xid()
    found = check.measure(xid(tmp_path, number))
    assert found.status is of_xid(number).status
    assert found.status in (Status.NODE_FAULT, Status.WARN)
    assert found.text.startswith(f"Xid {number} on GPU 0000:3b:00: ")


def said(tmp_path: Path, *lines: str, check: Xid | None = None) -> Finding:
    """Return what is found where the kernel wrote these lines, one after the other."""
    log = "".join(f"3,9,{9990000000 + n},-;{line}\n" for n, line in enumerate(lines))
    context = tree(tmp_path, {"/dev/kmsg": log, "/proc/uptime": "10000.0 1\n"})
    check = check or Xid()
    return check.measure(context)


LINK = "XC0 i0 Link 01 (0x021425c6 0x00000000)"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (f"149, NETIR_LINK_EVT  Fatal   {LINK}", Status.NODE_FAULT),
        (f"145, RLW_REMAP Fatal {LINK}", Status.WARN),  # of the other end of the link
        (f"145, pid=8, name=ray::Worker, RLW_RXPIPE Nonfatal {LINK}", Status.WARN),
        (f"145, pid=8, name=A Fatal XC0 i0, RLW_RXPIPE Nonfatal {LINK}", Status.WARN),
        (f"146, TLW_RX/TLW_RX_PIPE0 Fatal {LINK}", Status.WARN),
        ("149, NETIR Fatal", Status.WARN),
    ],
)
def test_an_nvlink_5_error_is_judged_by_the_drivers_last_words(
    tmp_path: Path, line: str, status: Status
) -> None:
    assert said(tmp_path, f"NVRM: Xid (PCI:0009:01:00): {line}").status is status


LINK_ERROR = "NVRM: Xid (PCI:0000:3b:00): 74, pid=77, name=python, NVLink: "
SWITCH = "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): "


@pytest.mark.parametrize("fatal_first", [True, False])
@pytest.mark.parametrize(
    ("fatal", "harmless", "words"),
    [
        (
            f"NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT  Fatal   {LINK}",
            "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT  Nonfatal XC0 i0 Link 07 (0x0)",
            "fatal NVLink error (NETIR_LINK_EVT)",
        ),
        (
            f"{SWITCH}20034, Fatal, Link 28 LTSSM Fault Up",
            f"{SWITCH}20034, Non-fatal, Link 30 LTSSM Fault Up",
            "Link 28 LTSSM Fault Up: fatal",
        ),
        (
            f"{LINK_ERROR}fatal error detected on link 14(0x0, 0x0)",
            f"{LINK_ERROR}error detected on link 2 (0x0)",
            "fatal NVLink error on link 14",
        ),
    ],
)
def test_a_harmless_error_of_the_same_number_hides_no_fatal_one(
    tmp_path: Path, fatal: str, harmless: str, words: str, fatal_first: bool
) -> None:
    lines = [fatal, harmless] if fatal_first else [harmless, fatal]
    found = said(tmp_path, *lines, check=Xid(fault=(74,)))

    assert found.status is Status.NODE_FAULT
    assert words in found.text
    assert found.figures["xids"] == 1


def test_of_two_errors_that_are_as_bad_the_later_is_told(tmp_path: Path) -> None:
    texts = ["Fatal, Link 28 LTSSM Fault Up", "Fatal, Link 30 LTSSM Fault Up", "Data {0x10}"]
    found = said(tmp_path, *(f"{SWITCH}20034, {text}" for text in texts))

    assert "Link 30" in found.text
    assert "Link 28" not in found.text


def recovery(before: str, now: str) -> str:
    line = f"154, GPU recovery action changed from 0x0 ({before}) to 0x1 ({now})"
    return f"NVRM: Xid (PCI:0009:01:00): {line}"


def test_the_recovery_that_the_driver_wants_counts_until_it_wants_none(tmp_path: Path) -> None:
    wanted = recovery("None", "Drain and Reset"), recovery("Drain and Reset", "GPU Reset Required")
    found = said(tmp_path, *wanted)
    assert found.status is Status.NODE_FAULT
    assert "the driver wants the GPU reset" in found.text
    over = recovery("GPU Reset Required", "None")
    assert said(tmp_path, *wanted, over).status is Status.PASS
    assert said(tmp_path, recovery("None", "Drain P2P")).status is Status.WARN


@pytest.mark.parametrize(
    ("lines", "bus"),
    [
        (["NVRM: GPU 0000:29:00.0: GPU has fallen off the bus."], "0000:29:00"),
        (["NVRM: GPU 18:00.0: GPU has fallen off the bus."], "0000:18:00"),
        (
            [
                "NVRM: The NVIDIA GPU 0000:18:00.0",
                "NVRM: (PCI ID: 10de:2901) installed in this system has",
                "NVRM: fallen off the bus and is not responding to commands.",
            ],
            "0000:18:00",
        ),
        # The same as /dev/kmsg has it: one message of three lines.
        (
            [
                r"\x0aNVRM: ".join(
                    [
                        "NVRM: The NVIDIA GPU 0000:18:00.0",
                        "(PCI ID: 10de:2901) installed in this system has",
                        "fallen off the bus and is not responding to commands.",
                    ]
                )
            ],
            "0000:18:00",
        ),
    ],
)
def test_a_gpu_that_fell_off_the_bus_is_known_without_a_number(
    tmp_path: Path, lines: list[str], bus: str
) -> None:
    found = said(tmp_path, *lines)
    assert found.status is Status.NODE_FAULT
    assert f"Xid 79 on GPU {bus}: " in found.text


def test_an_error_of_an_instance_of_a_gpu_is_one_of_the_gpu(tmp_path: Path) -> None:
    found = said(tmp_path, "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 48, pid=7, DBE")
    assert found.status is Status.NODE_FAULT
    assert "Xid 48 on GPU 0000:01:00: " in found.text


def test_a_switchs_error_without_a_word_on_its_severity_is_looked_at(tmp_path: Path) -> None:
    line = "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Data {0x50610002, 0x10100030}"
    found = said(tmp_path, line)
    assert found.status is Status.WARN
    assert "the driver does not state whether it is fatal" in found.text


def sxid(tmp_path: Path, text: str, number: int = 20034) -> Finding:
    lines = "".join(
        f"3,9,9990000000,-;nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): {number}, {each}\n"
        for each in (text, "Severity 1 Engine instance 28 Sub-engine instance 00", "Data {0x10}")
    )
    context = tree(tmp_path, {"/dev/kmsg": lines, "/proc/uptime": "10000.0 1\n"})
    return Xid().measure(context)


def test_a_fatal_error_of_an_nvswitch_is_a_fault_of_the_node(tmp_path: Path) -> None:
    found = sxid(tmp_path, "Fatal, Link 28 LTSSM Fault Up")

    assert found.status is Status.NODE_FAULT
    assert "SXid 20034 on NVSwitch 0000:c2:00: Link 28 LTSSM Fault Up: " in found.text
    assert "reset all GPUs and NVSwitches" in found.text


def test_only_a_reboot_ends_what_is_always_fatal(tmp_path: Path) -> None:
    assert "reboot the node" in sxid(tmp_path, "Fatal, Link 28 HOST_MHZ", 22003).text


LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=x, GPU has fallen off the bus."
LOST_IN_THREE = (
    "NVRM: The NVIDIA GPU 0000:3b:00.0",
    "NVRM: (PCI ID: 10de:2901) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)


def flooded(tmp_path: Path, *lines: str, of_others: int) -> CheckContext:
    """Return a node on which these lines are followed by so many of a program on another GPU."""
    exception = "NVRM: Xid (PCI:0000:86:00): 13, pid=77, name=python, Graphics SM Warp Exception"
    later = (f"{exception} on (GPC 0, TPC {n})" for n in range(of_others))
    said = [(99_200.0, line) for line in lines] + [(99_300.0, line) for line in later]
    log = "".join(f"3,{n},{int(at_s * 1e6)},-;{line}\n" for n, (at_s, line) in enumerate(said))
    return tree(tmp_path, {"/dev/kmsg": log, "/proc/uptime": "100000.0 1.0\n"})


@pytest.mark.parametrize("of_others", [199, 200, 5000])
@pytest.mark.parametrize("lines", [(LOST,), LOST_IN_THREE])
def test_no_number_of_harmless_errors_makes_a_node_forget_a_fault(
    tmp_path: Path, lines: tuple[str, ...], of_others: int
) -> None:
    node = flooded(tmp_path, *lines, of_others=of_others)
    retested = msgspec.structs.replace(node, context="retest", drained_uptime_s=99_290.0)

    for context in (node, retested):
        found = find_out(Xid(), context)
        assert found.status is Status.NODE_FAULT
        assert "GPU 0000:3b:00" in found.text
        assert "Xid 79 on" in found.text
        assert found.figures["xids"] == 2


def test_a_user_cannot_write_an_xid_by_naming_a_program(tmp_path: Path) -> None:
    line = "3,9,9990000000,-;x[7]: segfault in NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n"
    context = tree(tmp_path, {"/dev/kmsg": line, "/proc/uptime": "10000.0 1\n"})
    assert Xid().measure(context).status is Status.PASS


def test_a_site_may_amend_the_table(tmp_path: Path) -> None:
    lost = xid(tmp_path, 79)
    assert Xid(ignore=(79,)).measure(lost).status is Status.PASS
    assert Xid(warn=(79,)).measure(lost).status is Status.WARN
    assert Xid(fault=(13,)).measure(xid(tmp_path, 13)).status is Status.NODE_FAULT


def test_the_same_xid_is_seen_again_the_next_time(tmp_path: Path) -> None:
    context = xid(tmp_path, 79)
    for _ in range(2):
        assert Xid().measure(context).status is Status.NODE_FAULT


def test_one_lost_gpu_whose_address_is_written_in_two_ways_is_counted_once(tmp_path: Path) -> None:
    lines = (
        "NVRM: Xid (PCI:0000:21:00): 79, pid=77, name=python, GPU has fallen off the bus.",
        "NVRM: GPU 0000:21:00.0: GPU has fallen off the bus.",
    )
    node = flooded(tmp_path, *lines, of_others=0)
    assert find_out(Xid(), node).text.count("Xid 79") == 1
