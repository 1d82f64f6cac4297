# SPDX-License-Identifier: Apache-2.0
"""The kernel's log: whose lines count, and what they say of hardware."""

from __future__ import annotations

import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.kernel_log import KernelLog
from slurm_health.node.rules.finding import Status
from tests.cases import cases
from tests.node.checks.conftest import find_out
from tests.support.sites import tree

NODE, PASS = Status.NODE_FAULT, Status.PASS
RAID = "megaRAID: card failed, mfi gone"


@cases("node/checks/kernel_log.toml")
def test_a_line_of_the_kernels_counts_and_none_that_a_user_has_put_together(
    check: KernelLog, text: str, status: Status, well: CheckContext
) -> None:
    tree(well.root, {"/dev/kmsg": f"3,7,9990000000,-;{text}\n"})
    found = find_out(check, well)
    assert found.status is status
    assert found.text == f"{text} (kernel log)" or status is PASS


@cases("node/checks/kernel_log.toml")
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
