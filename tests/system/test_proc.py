# SPDX-License-Identifier: Apache-2.0
"""What is read of /proc: the limits of processors, and what users have mounted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_health.system.proc import CpuLimits, mounted_by_users, scheduled
from tests.support.journals import write_healthy_run
from tests.support.rows import rows


@rows
def test_what_limits_of_processors_cost_is_read_from_cgroups(
    tmp_path: Path, counts: dict[str, str], mounts: str, cgroup: str, throttled_s: float
) -> None:
    for name, text in counts.items():
        (tmp_path / "sys" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / name / "cpu.stat").write_text(text)
    (tmp_path / "mountinfo").write_text(mounts.format(tmp_path / "sys") + "\n")
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "cgroup").write_text(cgroup)

    limits = CpuLimits(tmp_path / "mountinfo")

    assert limits.throttled_s(tmp_path / "17") == pytest.approx(throttled_s)
    assert limits.throttled_s(tmp_path / "gone") == 0.0


def test_a_kernel_that_does_not_count_the_waits_of_threads_tells_none(tmp_path: Path) -> None:
    assert scheduled(tmp_path) == (0.0, 0.0)
    (tmp_path / "schedstat").write_text("1500000000 250000000 12\n")
    assert scheduled(tmp_path) == (1.5, 0.25)


# --- filesystems that users mount over journals ---------------------------------------------------


MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
gluster:/v {root} fuse.glusterfs rw,user_id=0,group_id=0,allow_other 0 0
evil {root}/lab/7 fuse.sshfs rw,nosuid,nodev,user_id=1001,group_id=1001 0 0
evil {root}/lab/8/0/a\\040b fuse rw,user_id=1001,group_id=1001,allow_other 0 0
evil {root}/fake fuse.x rw,group_id=0,user_id=1001 0 0
evil {root}2/lab/9 fuse.x rw,user_id=1001,group_id=0 0 0
nfs:/v {root}/lab/10 nfs4 rw,user_id=1001 0 0
"""


def test_what_users_have_mounted_is_told_from_what_a_site_has(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    assert mounted_by_users(tmp_path, mounts) == frozenset()
    mounts.write_text(MOUNTS.format(root=tmp_path / "root"))

    assert mounted_by_users(tmp_path / "root", mounts) == {"lab/7", "lab/8", "fake"}


@pytest.mark.root
@pytest.mark.parametrize("option", ["", "allow_other"])
def test_what_a_user_mounts_over_a_journal_stops_no_one(tmp_path: Path, option: str) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no /dev/fuse")
    root = tmp_path / "root"
    write_healthy_run(root, job=8, nodes=("n1", "n2"))
    for each in (root, root / "lab"):
        each.chmod(0o1777)
    argv = [sys.executable, "-m", "tests.system.journal.user_mount", str(root), option]
    ran = subprocess.run(
        argv,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if "unshare: Operation not permitted" in ran.stderr or "mount: " in ran.stderr:
        pytest.skip(f"cannot mount here: {ran.stderr.splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr
    lemons, cleaned, listed, job, task, directory = json.loads(ran.stdout)
    assert '"cluster": "lab"' in lemons, lemons
    assert "1 journal," in cleaned, cleaned
    assert "train.sh finished after" in listed, listed
    assert "a user has mounted something there" in job, job
    assert "hangs" not in task, task
    assert directory.startswith("lab/7.")
