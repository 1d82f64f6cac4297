# SPDX-License-Identifier: Apache-2.0
"""Filesystems: broken, full, refused, and nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from slurm_health.node.checks.check import CheckContext, NotApplicable
from slurm_health.node.checks.external import ProgramRun
from slurm_health.node.checks.filesystem import Filesystem, MountState, StorageClients
from slurm_health.node.rules.finding import Status
from slurm_health.records.errors import Unmeasured
from tests.node.checks.conftest import find_out
from tests.support.rows import rows
from tests.support.sites import tree

NODE, USER = Status.NODE_FAULT, Status.USER_FAULT


def seen(**changes: object) -> MountState:
    base = {"mounted": True, "fstype": "nfs4", "total_bytes": 100, "available_bytes": 50}
    return msgspec.convert({**base, **changes}, MountState)


@rows
def test_no_node_is_blamed_for_its_server(number: str, local: Status, served: Status) -> None:
    import errno

    check = Filesystem(path="/home", writable=True)
    for kind, status in (("xfs", local), ("nfs4", served), ("fuse.glusterfs", served)):
        state = seen(fstype=kind, write_errno=getattr(errno, number))
        assert check.judge(state).status is status


def test_a_full_filesystem_is_told_in_bytes_and_in_inodes() -> None:
    check = Filesystem(path="/home", min_free_inodes_percent=10)
    assert check.judge(seen(total_inodes=0)).status is Status.PASS  # it has none
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


def test_nothing_is_left_behind_by_a_trial_write(well: CheckContext) -> None:
    find_out(Filesystem(path="/scratch", writable=True), well)
    assert [each.name for each in well.path("/scratch").iterdir()] == [".keep"]


OUTPUTS = Path(__file__).parents[2] / "data" / "storage_clients"


@rows
def test_a_client_without_its_server_is_a_warning_by_its_own_words(
    kind: str, state: str, status: Status, text: str
) -> None:
    output = (OUTPUTS / f"{kind}.txt").read_text().format(state=state)
    finding = StorageClients().judge(kind, ProgramRun(0, output))
    assert (finding.status, finding.text) == (status, text)


def test_a_node_without_such_a_client_has_nothing_to_check(tmp_path: Path) -> None:
    machine = tree(tmp_path, {"/proc/self/mounts": "srv:/home /home nfs4 rw 0 0\n"})
    with pytest.raises(NotApplicable):
        StorageClients().measure(machine)
    finding = StorageClients().judge("gpfs", ProgramRun(1, "mmgetstate: not the root user"))
    assert finding.status is Status.INCONCLUSIVE
    assert finding.text == "mmgetstate -Y: mmgetstate: not the root user"


# --- an automounter -------------------------------------------------------------------------------


def play(directory: Path, what: str) -> list[str]:
    """Return status and text of a check of an automounted directory."""
    if os.getuid() != 0 or "autofs" not in Path("/proc/filesystems").read_text():
        pytest.skip("needs root and a kernel with autofs")
    argv = [sys.executable, "-m", "tests.node.checks.automounter", str(directory), what]
    root = Path(__file__).parents[3]
    ran = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    if "PermissionError" in ran.stderr:
        pytest.skip(f"cannot mount here: {ran.stderr.splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr
    found: list[str] = json.loads(ran.stdout)
    return found


def test_a_filesystem_that_is_mounted_when_it_is_touched_passes(tmp_path: Path) -> None:
    assert play(tmp_path, "mounts") == ["pass", f"{tmp_path} is fine"]


def test_an_automounter_that_mounts_nothing_is_no_fault_of_the_node(tmp_path: Path) -> None:
    status, text = play(tmp_path, "fails")
    assert status == "inconclusive"
    assert str(tmp_path) in text


@rows
@pytest.mark.parametrize("exists", [True, False])
def test_the_automounters_own_line_says_nothing_of_the_node(
    well: CheckContext, table: str, path: str, exists: bool
) -> None:
    """The trigger itself, and a name below it that is not mounted now."""
    tree(well.root, {"/proc/self/mounts": f"/dev/sda1 / ext4 rw 0 0\n{table}\n"})
    well.path("/scratch/.keep").unlink()
    well.path("/scratch").rmdir()
    if exists:
        well.path(path).mkdir(parents=True)
    with pytest.raises(Unmeasured, match=path):
        Filesystem(path=path, fstype="nfs4").measure(well)
