# SPDX-License-Identifier: Apache-2.0
"""Whose the directories of jobs are, and what is no user's journal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_health.system import journal

# In a mount namespace of its own, so that nothing stays mounted.
MOUNTED = """\
mount -t tmpfs -o uid=0 none "$1/7" && exec "$2" -c '
import json, sys
from pathlib import Path
from slurm_health.system import journal
found = journal.statuses([Path(sys.argv[1], name) for name in ("7", "8")])
print(json.dumps([each.trouble for each in found]))' "$1"
"""


def test_directories_links_and_what_is_gone_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "12").mkdir()
    (tmp_path / "9_1").symlink_to("12")
    (tmp_path / "file").touch()
    many = [str(number) for number in range(100, 2500)]  # more than one child looks at
    names = ["12", "9_1", "file", "13", "x" * 300, *many, "12"]
    directory, link, file, gone, odd, *absent, again = journal.statuses(
        [tmp_path / name for name in names]
    )
    assert directory
    assert link
    assert file
    assert (directory.is_directory, link.is_directory, file.is_directory) == (True, False, False)
    assert (directory.uid, directory.trouble) == (os.getuid(), "")
    assert directory.changed_s == (tmp_path / "12").stat().st_mtime
    assert (directory.target, link.target) == ("", "12")
    assert gone is None
    assert odd
    assert odd.trouble == "File name too long"
    assert set(absent) == {None}
    assert again == directory


@pytest.mark.root
def test_what_is_mounted_over_a_directory_is_told_whoever_it_says_it_belongs_to(
    tmp_path: Path,
) -> None:
    for name in ("7", "8"):
        (tmp_path / name).mkdir()
    argv = ["unshare", "--mount", "sh", "-c", MOUNTED, "sh", str(tmp_path), sys.executable]
    root = Path(__file__).parents[3]
    ran = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False)
    if "Operation not permitted" in ran.stderr or "mount: " in ran.stderr:
        pytest.skip(f"cannot mount here: {ran.stderr.splitlines()[-1]}")
    assert json.loads(ran.stdout) == ["a filesystem is mounted there", ""], ran.stderr
