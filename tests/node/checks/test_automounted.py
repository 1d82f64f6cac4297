# SPDX-License-Identifier: Apache-2.0
"""A filesystem that an automounter mounts when it is touched, with the kernel's own automounter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.filesystem import Filesystem
from slurm_health.records.errors import Unmeasured
from tests.cases import cases
from tests.support.sites import tree


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


@cases("node/checks/automounted.toml")
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
