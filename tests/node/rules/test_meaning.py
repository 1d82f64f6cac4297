# SPDX-License-Identifier: Apache-2.0
"""What a person who has met an Xid or a line of the kernel's log is told: what the checks judge."""

from __future__ import annotations

import pytest

from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.kernel_lines import (
    FAULTS,
    KINDS,
    WARNINGS,
    XIDS,
    all_errors,
    explained,
    of_xid,
)

LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid=77, name=python, GPU has fallen off the bus."
FATAL_LINK = (
    "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021410c6 0x0)"
)


@pytest.mark.parametrize("words", ["79", "xid 79", "Xid: 79", "xid79", "xid-79", " 79 ", LOST])
def test_an_xid_is_known_by_its_number_and_by_its_line(words: str) -> None:
    found = explained(words)

    assert found is not None
    assert (found.name, found.status, found.check) == ("Xid 79", Status.NODE_FAULT, "xid")
    assert "reboot the node" in found.helps


@pytest.mark.parametrize(
    "stamp",
    ["[ 1234.567890] ", "[Mon Nov 23 12:00:00 2026] ", "Nov 23 12:00:00 n1 kernel: [ 1.2] "],
)
def test_a_line_may_stand_behind_what_dmesg_or_a_log_puts_before_it(stamp: str) -> None:
    found = explained(stamp + LOST)

    assert found is not None
    assert found.name == "Xid 79"


def test_a_whole_line_decides_what_a_number_leaves_open() -> None:
    number, line = explained("149"), explained(FATAL_LINK)

    assert number is not None
    assert line is not None
    assert (number.status, line.status) == (Status.WARN, Status.NODE_FAULT)
    assert "NETIR_LINK_EVT" in line.what
    assert line.helps == "reset the GPU"


def test_a_line_that_takes_back_what_the_driver_wanted_leaves_nothing_to_do() -> None:
    found = explained(
        "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1"
        " (GPU Reset Required) to 0x0 (None)"
    )

    assert found is not None
    assert (found.status, found.helps) == (Status.PASS, "nothing")
    assert "nothing more" in found.what


def test_an_xid_of_a_program_is_the_programs_and_no_nodes() -> None:
    found = explained("31")

    assert found is not None
    assert (found.whose, found.status) == ("program", Status.PASS)


def test_an_nvswitchs_error_is_judged_by_its_number_and_by_the_drivers_word() -> None:
    line = "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Non-fatal, Link 28 LTSSM Fault Up"
    always, told = explained("sxid 22003"), explained(line)

    assert always is not None
    assert told is not None
    assert (always.status, told.status) == (Status.NODE_FAULT, Status.WARN)
    assert told.what == "Link 28 LTSSM Fault Up: not fatal"


def test_a_line_that_begins_with_a_process_is_held_against_no_node() -> None:
    found = explained("EXT4-fs (a[77]: segfault at 0 ip 00 sp 00 error 4 in x")

    assert found is not None
    assert (found.whose, found.status) == ("program", Status.PASS)


@pytest.mark.parametrize("words", ["9999", "all is well", "sxid", "", "-5"])
def test_what_no_check_knows_is_not_explained(words: str) -> None:
    assert explained(words) is None


def test_each_row_of_the_table_is_found_by_its_name() -> None:
    rows = list(all_errors())

    assert [explained(row.name) for row in rows] == rows
    assert len({row.name for row in rows}) == len(rows)


def test_the_table_says_what_the_checks_judge() -> None:
    told = {row.name: row.status for row in all_errors()}

    assert {f"Xid {number}": of_xid(number).status for number in XIDS}.items() <= told.items()
    for kind in KINDS:
        assert kind.pattern in (FAULTS if told[kind.name] is Status.NODE_FAULT else WARNINGS)


def test_each_row_says_whose_matter_it_is_and_what_to_do() -> None:
    assert all(row.what and row.whose and row.helps and row.source for row in all_errors())
