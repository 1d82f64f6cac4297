# SPDX-License-Identifier: Apache-2.0
"""Xids in the kernel's log: which drain, which warn, and which say nothing of the node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.kernel_log import Xid
from slurm_health.node.rules.finding import Finding, Status
from tests.node.checks.conftest import find_out
from tests.support.sites import tree


def xid(tmp_path: Path, number: int, bus: str = "PCI:0000:3b:00") -> CheckContext:
    line = f"3,9,9990000000,-;NVRM: Xid ({bus}): {number}, pid=77, name=python, text\n"
    return tree(tmp_path, {"/dev/kmsg": line, "/proc/uptime": "10000.0 1\n"})


def said(tmp_path: Path, *lines: str, check: Xid | None = None) -> Finding:
    """Return what is found where the kernel wrote these lines, one after the other."""
    log = "".join(f"3,9,{9990000000 + n},-;{line}\n" for n, line in enumerate(lines))
    context = tree(tmp_path, {"/dev/kmsg": log, "/proc/uptime": "10000.0 1\n"})
    check = check or Xid()
    return check.measure(context)


NODE, WARN, PASS = Status.NODE_FAULT, Status.WARN, Status.PASS
LINK = "XC0 i0 Link 01 (0x021425c6 0x00000000)"
OF_9 = "NVRM: Xid (PCI:0009:01:00): "
SWITCH = "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): "
ON_SWITCH = "SXid 20034 on NVSwitch 0000:c2:00: Link 28 LTSSM Fault Up: "
OFF_BUS = (
    "NVRM: The NVIDIA GPU 0000:18:00.0",
    "NVRM: (PCI ID: 10de:2901) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)
TO_RESET = "the driver wants the GPU reset"


def recovery(before: str, now: str) -> str:
    return f"{OF_9}154, GPU recovery action changed from 0x0 ({before}) to 0x1 ({now})"


WANTED = (
    recovery("None", "Drain and Reset"),
    recovery("Drain and Reset", "GPU Reset Required"),
)


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        ([f"{OF_9}149, NETIR_LINK_EVT  Fatal   {LINK}"], NODE, "Xid 149"),
        ([f"{OF_9}145, RLW_REMAP Fatal {LINK}"], WARN, "Xid 145"),  # of the link's other end
        ([f"{OF_9}145, pid=8, name=ray::Worker, RLW_RXPIPE Nonfatal {LINK}"], WARN, "Xid 145"),
        ([f"{OF_9}145, pid=8, name=A Fatal XC0 i0, RLW_RXPIPE Nonfatal {LINK}"], WARN, "Xid 145"),
        ([f"{OF_9}146, TLW_RX/TLW_RX_PIPE0 Fatal {LINK}"], WARN, "Xid 146"),
        ([f"{OF_9}149, NETIR Fatal"], WARN, "Xid 149"),
        (["NVRM: Xid (PCI:0000:01:00 GPU-I:05): 48, pid=7, DBE"], NODE, "Xid 48 on GPU 0000:01:00"),
        # What the driver wants counts until it wants nothing.
        (WANTED, NODE, TO_RESET),
        ([*WANTED, recovery("GPU Reset Required", "None")], PASS, ""),
        ([recovery("None", "Drain P2P")], WARN, ""),
        # Fallen off the bus, without a number; the last as /dev/kmsg has it, one message.
        (["NVRM: GPU 0000:29:00.0: GPU has fallen off the bus."], NODE, "79 on GPU 0000:29:00: "),
        (["NVRM: GPU 18:00.0: GPU has fallen off the bus."], NODE, "Xid 79 on GPU 0000:18:00: "),
        (OFF_BUS, NODE, "Xid 79 on GPU 0000:18:00: "),
        ([r"\x0a".join(OFF_BUS)], NODE, "Xid 79 on GPU 0000:18:00: "),
        # NVSwitches: of errors that are as bad the later is reported; only a reboot ends some.
        ([f"{SWITCH}20034, Data {{0x50610002}}"], WARN, "does not state whether it is fatal"),
        ([f"{SWITCH}20034, Fatal, Link 28 LTSSM Fault Up"], NODE, ON_SWITCH),
        ([f"{SWITCH}20034, Fatal, Link {n} Up" for n in (28, 30)], NODE, "Link 30"),
        ([f"{SWITCH}22003, Fatal, Link 28 HOST_MHZ"], NODE, "reboot the node"),
        # A program can be named so.
        (["x[7]: segfault in NVRM: Xid (PCI:0000:3b:00): 79, pid=1"], PASS, ""),
    ],
)
def test_the_drivers_own_words_decide(
    tmp_path: Path, lines: Sequence[str], status: Status, words: str
) -> None:
    found = said(tmp_path, *lines)
    assert found.status is status
    assert words in found.text


LINK_ERROR = "NVRM: Xid (PCI:0000:3b:00): 74, pid=77, name=python, NVLink: "


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


def test_a_site_may_amend_the_table(tmp_path: Path) -> None:
    lost = xid(tmp_path, 79)
    assert Xid(ignore=(79,)).measure(lost).status is Status.PASS
    assert Xid(warn=(79,)).measure(lost).status is Status.WARN
    assert Xid(fault=(13,)).measure(xid(tmp_path, 13)).status is Status.NODE_FAULT


def test_one_lost_gpu_whose_address_is_written_in_two_ways_is_counted_once(tmp_path: Path) -> None:
    lines = (
        "NVRM: Xid (PCI:0000:21:00): 79, pid=77, name=python, GPU has fallen off the bus.",
        "NVRM: GPU 0000:21:00.0: GPU has fallen off the bus.",
    )
    node = flooded(tmp_path, *lines, of_others=0)
    assert find_out(Xid(), node).text.count("Xid 79") == 1
