# SPDX-License-Identifier: Apache-2.0
"""The kernel's log: whose lines count, and what they say of hardware."""

from __future__ import annotations

import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.kernel_log import KernelLog
from slurm_health.node.rules.finding import Status
from tests.node.checks.conftest import find_out
from tests.support.sites import tree

NODE, WARN, PASS = Status.NODE_FAULT, Status.WARN, Status.PASS
BAD = "EXT4-fs error (device sda1): bad block"
XFS_NAME = "XFS (x): [77]: segfault at 0 ip 0 sp 0 error 4 in Corruption[400000+1000]"
RAID = "megaRAID: card failed, mfi gone"
OWN_RAID = tuple(
    ("^(x)", pattern, "^(?P<card>y)", "^EXT4-fs error")  # beside others, with groups of their own
    for pattern in (r"(?i)^megaraid", r"^(m)ega.*\b\1fi", r"^(?P<card>mega)RAID")
)


@pytest.mark.parametrize(
    ("check", "text", "status"),
    [
        (KernelLog(), BAD, NODE),
        (KernelLog(), "Buffer I/O error on dev sdd1, logical block 0, lost sync page write", NODE),
        (KernelLog(fault=(), warn=("^EXT4-fs",)), BAD, WARN),
        (KernelLog(fault=(), warn=()), BAD, PASS),
        *((KernelLog(fault=fault), RAID, NODE) for fault in OWN_RAID),
        # By the name of a program that crashes, or by an image that is mounted for its user.
        (KernelLog(), "EXT4-fs error[77]: segfault at 0 ip 0 sp 0 error 4 in EXT4-fs error", PASS),
        (KernelLog(), "traps: EXT4-fs error[77] trap invalid opcode ip:0 sp:0 error:0", PASS),
        (KernelLog(), "EXT4-fs error (device loop3): ext4_lookup:1: bad block", PASS),
        (KernelLog(), "XFS (loop0): Corruption of in-memory data detected", PASS),
        (KernelLog(), XFS_NAME, PASS),
        (KernelLog(fault=(r"^XFS.*Corruption",)), XFS_NAME, PASS),
        (KernelLog(), "EXT4-fs (a[77]: segfault at 0 in x): Remounting filesystem read-only", PASS),
        (KernelLog(), "Out of memory[77]: segfault at 0 ip 0 sp 0 error 4", PASS),
        (KernelLog(), "python[77]: segfault in mce: [Hardware Error]: Uncorrected", PASS),
        (KernelLog(), "NVRM: Xid (PCI:0000:3b:00): 13, pid=7, name=EXT4-fs error (device s)", PASS),
    ],
)
def test_a_line_of_the_kernels_counts_and_none_that_a_user_has_put_together(
    check: KernelLog, text: str, status: Status, well: CheckContext
) -> None:
    tree(well.root, {"/dev/kmsg": f"3,7,9990000000,-;{text}\n"})
    found = find_out(check, well)
    assert found.status is status
    assert found.text == f"{text} (kernel log)" or status is PASS


@pytest.mark.parametrize(
    "line",
    [
        f"3,7,1000000,-;{BAD}",  # long ago
        f"11,7,9990000000,-;{BAD}",  # by `echo > /dev/kmsg`, whatever level the writer asks for
        *(";;;", "x,y,z,-;EXT4-fs error", "3;EXT4-fs error", "\xff"),
    ],
)
def test_what_is_old_garbled_or_written_by_a_program_does_not_count(
    line: str, well: CheckContext
) -> None:
    tree(well.root, {"/dev/kmsg": f"{line}\n"})
    assert find_out(KernelLog(), well).status is PASS


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
