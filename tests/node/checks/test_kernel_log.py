# SPDX-License-Identifier: Apache-2.0
"""The kernel's log: whose lines count, and what they say of hardware."""

from __future__ import annotations

import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.kernel_log import KernelLog
from slurm_health.node.rules.finding import Status
from tests.node.checks.conftest import find_out
from tests.support.sites import tree

NODE = Status.NODE_FAULT


def test_old_messages_of_the_kernel_do_not_count(well: CheckContext) -> None:
    tree(well.root, {"/dev/kmsg": "3,7,1000000,-;EXT4-fs error (device sda1)\n"})
    assert find_out(KernelLog(), well).status is Status.PASS


def test_a_message_that_a_program_wrote_is_not_the_kernels(well: CheckContext) -> None:
    """Facility 1 is what `echo > /dev/kmsg` gets, whatever level the writer asks for."""
    tree(well.root, {"/dev/kmsg": "11,7,9990000000,-;EXT4-fs error (device sda1)\n"})
    assert find_out(KernelLog(), well).status is Status.PASS


@pytest.mark.parametrize(
    "text",
    [
        "EXT4-fs error[77]: segfault at 0 ip 0 sp 0 error 4 in EXT4-fs error",
        "traps: EXT4-fs error[77] trap invalid opcode ip:0 sp:0 error:0",
        "EXT4-fs error (device loop3): ext4_lookup:1: bad block",
        "XFS (loop0): Corruption of in-memory data detected",
        "XFS (x): [77]: segfault at 0 ip 0 sp 0 error 4 in Corruption[400000+1000]",
        "EXT4-fs (a[77]: segfault at 0 ip 0 sp 0 error 4 in x): Remounting filesystem read-only",
        "Out of memory[77]: segfault at 0 ip 0 sp 0 error 4",
        "python[77]: segfault in mce: [Hardware Error]: Uncorrected",
        "NVRM: Xid (PCI:0000:3b:00): 13, pid=7, name=EXT4-fs error (device sda1)",
    ],
)
def test_a_user_cannot_write_a_fault_into_the_kernels_log(text: str, well: CheckContext) -> None:
    """By the name of a program that crashes, or by an image that is mounted for them."""
    tree(well.root, {"/dev/kmsg": f"3,7,9990000000,-;{text}\n"})
    assert find_out(KernelLog(), well).status is Status.PASS


def test_a_sites_own_pattern_finds_nothing_in_a_line_that_begins_with_a_program(
    well: CheckContext,
) -> None:
    text = "XFS (x): [77]: segfault at 0 ip 0 sp 0 error 4 in Corruption[400000+1000]"
    tree(well.root, {"/dev/kmsg": f"3,7,9990000000,-;{text}\n"})
    assert find_out(KernelLog(fault=(r"^XFS.*Corruption",)), well).status is Status.PASS


def test_a_sites_own_fault_must_begin_where_a_line_does() -> None:
    """`tmpfs: Unknown parameter '...'` has any user's words in its middle."""
    with pytest.raises(ValueError, match=r"must begin with \^"):
        KernelLog(fault=("Corruption",))
    KernelLog(fault=(r"(?i)^xfs.*corruption",), warn=("anything",))


@pytest.mark.parametrize("warnings", [1, 200, 3000])
def test_no_number_of_warnings_makes_a_node_forget_a_fault(
    warnings: int, well: CheckContext
) -> None:
    later = (f"I/O error, dev sda, sector {n} op 0x0:(READ) {'.' * 300}" for n in range(warnings))
    lines = ["EXT4-fs (sda1): Remounting filesystem read-only", *later]
    tree(well.root, {"/dev/kmsg": "".join(f"3,7,9990000000,-;{line}\n" for line in lines)})
    found = find_out(KernelLog(), well)

    assert found.status is NODE
    assert found.text == f"{lines[0]} (kernel log)"


def test_a_message_that_is_fault_and_warning_counts_once_as_each(well: CheckContext) -> None:
    text = "Buffer I/O error on dev sdd1, logical block 0, lost sync page write"
    tree(well.root, {"/dev/kmsg": f"3,7,9990000000,-;{text}\n"})

    assert find_out(KernelLog(), well).text == f"{text} (kernel log)"


def test_a_site_may_look_for_warnings_alone_or_for_nothing(well: CheckContext) -> None:
    tree(well.root, {"/dev/kmsg": "3,7,9990000000,-;EXT4-fs (sda1): Remounting filesystem\n"})

    assert find_out(KernelLog(fault=(), warn=("^EXT4-fs",)), well).status is Status.WARN
    assert find_out(KernelLog(fault=(), warn=()), well).status is Status.PASS


@pytest.mark.parametrize("pattern", [r"(?i)^megaraid", r"^(m)ega.*\b\1fi", r"^(?P<card>mega)RAID"])
def test_a_sites_pattern_may_be_any_regular_expression(pattern: str, well: CheckContext) -> None:
    """Beside others, with flags, numbered and named groups of its own."""
    tree(well.root, {"/dev/kmsg": "3,7,9990000000,-;megaRAID: card failed, mfi gone\n"})
    fault = ("^(x)", pattern, "^(?P<card>y)", "^EXT4-fs error")

    assert find_out(KernelLog(fault=fault), well).status is NODE


@pytest.mark.parametrize("line", [";;;", "x,y,z,-;EXT4-fs error", "3;EXT4-fs error", "\xff"])
def test_garbled_messages_are_passed_over(line: str, well: CheckContext) -> None:
    tree(well.root, {"/dev/kmsg": f"{line}\n"})
    assert find_out(KernelLog(), well).status is Status.PASS
