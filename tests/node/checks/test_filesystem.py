# SPDX-License-Identifier: Apache-2.0
"""Filesystems: broken, full, refused, and nothing left behind."""

from __future__ import annotations

import msgspec
import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.filesystem import Filesystem, MountState
from slurm_health.node.rules.finding import Status
from tests.node.checks.conftest import find_out
from tests.support.sites import tree

NODE, USER = Status.NODE_FAULT, Status.USER_FAULT
FIELDS = "rw,relatime 0 0"


def seen(**changes: object) -> MountState:
    base = {"mounted": True, "fstype": "nfs4", "total_bytes": 100, "available_bytes": 50}
    return msgspec.convert({**base, **changes}, MountState)


@pytest.mark.parametrize(
    ("number", "status"),
    [("EROFS", NODE), ("EIO", NODE), ("ESTALE", NODE), ("ENOSPC", USER), ("EDQUOT", USER)],
)
def test_a_failed_write_is_blamed_on_whoever_it_is_due_to(number: str, status: Status) -> None:
    import errno

    check = Filesystem(path="/home", writable=True)
    assert check.judge(seen(write_errno=getattr(errno, number))).status is status


def test_a_filesystem_that_squashes_root_is_not_broken() -> None:
    import errno

    check = Filesystem(path="/home", writable=True)
    assert check.judge(seen(write_errno=errno.EACCES)).status is Status.INCONCLUSIVE


def test_a_full_filesystem_is_told_in_bytes_and_in_inodes() -> None:
    check = Filesystem(path="/home", min_available_percent=60, min_free_inodes_percent=10)
    found = check.judge(seen(total_inodes=1000, free_inodes=1))
    assert found.status is USER
    assert "50 % left, limit 60 %" in found.text
    assert "0.1 % of its inodes left, limit 10 %" in found.text


@pytest.mark.parametrize(
    "full", [{"available_bytes": 1}, {"total_inodes": 1000, "free_inodes": 1}, {"write_errno": 28}]
)
def test_full_is_the_nodes_fault_where_the_site_says_so(full: dict[str, int]) -> None:
    limits = {"min_available_percent": 10, "min_free_inodes_percent": 10, "writable": True}
    check = msgspec.convert({"path": "/local", **limits}, Filesystem)
    assert check.judge(seen(**full)).status is USER
    strict = msgspec.structs.replace(check, full_is_fault=True)
    assert strict.judge(seen(**full)).status is NODE


def test_a_filesystem_without_inodes_is_not_out_of_them() -> None:
    check = Filesystem(path="/home", min_free_inodes_percent=10)
    assert check.judge(seen(total_inodes=0)).status is Status.PASS


def test_a_mount_point_with_a_space_is_found(well: CheckContext) -> None:
    tree(well.root, {"/proc/self/mounts": f"x /my\\040disk ext4 {FIELDS}\n", "/my disk/x": ""})
    assert find_out(Filesystem(path="/my disk"), well).status is Status.PASS


def test_nothing_is_left_behind_by_a_trial_write(well: CheckContext) -> None:
    find_out(Filesystem(path="/scratch", writable=True), well)
    assert [each.name for each in well.path("/scratch").iterdir()] == [".keep"]
