# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.monitor.surroundings import KernelLog, MemoryKills, SlurmWord
from tests.support.ended_jobs import job


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_kills_for_memory_are_counted_in_the_cgroup_of_the_whole_job(
    tmp_path: Path, version: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    inside = "/slurm/uid_1000/job_12/step_batch/task_0"
    controllers, mount, events, limit = {
        "v1": ("5:memory:", "sys/fs/cgroup/memory", "memory.oom_control", "memory.limit_in_bytes"),
        "v2": ("0::", "sys/fs/cgroup", "memory.events", "memory.max"),
    }[version]
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpu:/\n{controllers}{inside}\n")
    directory = tmp_path / mount / "slurm/uid_1000/job_12"
    directory.mkdir(parents=True)
    (directory / events).write_text("oom 2\noom_kill 2\n")
    (directory / limit).write_text("1000000\n")
    found = MemoryKills(tmp_path).collect_data(job(tmp_path))

    assert (found.kills, found.limit_bytes) == (2, 1_000_000)


# Allocates more than its cgroup may have, in a child that the kernel kills; then looks.
USES_UP_MEMORY = """
import os, sys
from pathlib import Path
from slurm_health.training.monitor.surroundings import MemoryKills
from tests.support.ended_jobs import job
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
child = os.fork()
if not child:
    Path("/proc/self/oom_score_adj").write_text("1000")
    held = b"x" * (256 << 20)
    os._exit(0)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 9
print(MemoryKills().collect_data(job(Path("/"), environ={"SLURM_JOB_ID": sys.argv[2]})).kills)
"""


@pytest.fixture
def job_cgroup() -> Iterator[tuple[Path, str]]:
    """A real memory cgroup of 128 MB with the name that Slurm gives to a job's, and the job."""
    number = str(900_000_000 + os.getpid())
    directory = Path("/sys/fs/cgroup/memory", f"job_{number}")
    try:
        directory.mkdir()
        (directory / "memory.limit_in_bytes").write_text(str(128 << 20))
    except OSError as err:
        pytest.skip(f"no memory cgroup (version 1) can be made here: {err}")
    yield directory, number
    directory.rmdir()


def test_a_kill_by_the_kernel_for_the_memory_of_a_job_is_counted(
    job_cgroup: tuple[Path, str],
) -> None:
    directory, number = job_cgroup
    done = subprocess.run(
        [sys.executable, "-c", USES_UP_MEMORY, directory, number],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_without_a_cgroup_of_the_job_kills_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/slurmd.service\n")

    assert not MemoryKills(tmp_path).is_enabled(job(tmp_path))


def test_what_the_kernel_said_since_the_script_began_is_collected(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/uptime").write_text("1000.0 1.0\n")
    (tmp_path / "dev/kmsg").write_text(
        "3,1,100000000,-;NVRM: Xid (PCI:0000:3b:00): 79, of an earlier job\n"
        "3,2,990000000,-;NVRM: Xid (PCI:0000:3b:00): 48, pid=1\n"
        "3,3,995000000,-;something else\n"
        "6,4,995000000,-;x[7]: segfault at 0 ip 0 sp 0 error 4 in I/O error[400000+1000]\n"
        "6,5,995000000,-;traps: SXid[7] trap divide error ip:0 sp:0 error:0 in x[400000+1000]\n"
    )
    found = KernelLog(tmp_path).collect_data(job(tmp_path, duration_s=60.0))

    assert found.messages == ("NVRM: Xid (PCI:0000:3b:00): 48, pid=1",)


def test_a_kernel_log_that_may_not_be_read_says_why(tmp_path: Path) -> None:
    enabled = KernelLog(tmp_path).is_enabled(job(tmp_path))

    assert not enabled
    assert "/dev/kmsg of n1" in enabled.why_not


def test_outside_a_job_slurm_is_not_asked(tmp_path: Path) -> None:
    assert not SlurmWord().is_enabled(job(tmp_path, environ={}))


def test_slurm_is_not_asked_where_it_cannot_know_more_than_the_script(tmp_path: Path) -> None:
    def asked(**end: Any) -> bool:
        return bool(SlurmWord().is_enabled(job(tmp_path, end=ScriptEnd(**end))))

    assert not asked(exit_code=1, nodes=("n1",))
    assert asked(exit_code=143, nodes=("n1",))
    assert asked(exit_code=137, signal=9, nodes=("n1",))
    assert asked(exit_code=1, nodes=("n1", "n2"))
