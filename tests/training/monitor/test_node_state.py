# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from slurm_health.records.decoding import JsonDecoder
from slurm_health.records.errors import Unmeasured
from slurm_health.system.nvml import GpuDevice, Gpus
from slurm_health.training.diagnosis.collected import FlightRecord, NodeTold
from slurm_health.training.monitor.messages import MessageReader
from slurm_health.training.monitor.node_state import (
    judged,
    kernel_lines,
    links,
    memory_kills,
    node_state,
    of_the_job,
    within,
)


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
    found = memory_kills(tmp_path, "12")

    assert (found.kills, found.limit_bytes) == (2, 1_000_000)


def test_no_kill_in_a_job_is_known_where_steps_count_for_themselves(tmp_path: Path) -> None:
    """In version 1 of cgroups a kill counts in the cgroup of the killed, and in none above."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:memory:/slurm/uid_1000/job_12/step_batch\n")
    directory = tmp_path / "sys/fs/cgroup/memory/slurm/uid_1000/job_12"
    directory.mkdir(parents=True)
    (directory / "memory.oom_control").write_text("oom_kill_disable 0\noom_kill 0\n")

    with pytest.raises(Unmeasured, match="each step counts for itself"):
        memory_kills(tmp_path, "12")


# Allocates more than its cgroup may have, in a child that the kernel kills; then looks.
USES_UP_MEMORY = """
import os, sys
from pathlib import Path
from slurm_health.training.monitor.node_state import memory_kills
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
child = os.fork()
if not child:
    Path("/proc/self/oom_score_adj").write_text("1000")
    held = b"x" * (256 << 20)
    os._exit(0)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 9
print(memory_kills(Path("/"), sys.argv[2]).kills)
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

    with pytest.raises(Unmeasured, match="no memory cgroup"):
        memory_kills(tmp_path, "12")


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
    assert kernel_lines(tmp_path, 60.0) == ("NVRM: Xid (PCI:0000:3b:00): 48, pid=1",)


def test_a_flood_of_harmless_lines_hides_no_fault_from_the_job(tmp_path: Path) -> None:
    exception = "NVRM: Xid (PCI:0000:86:00): 13, pid=77, name=python, Graphics SM Warp Exception"
    disk = "I/O error, dev sda, sector 8"
    rare = [
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x, GPU has fallen off the bus.",
        "EXT4-fs (sda1): Remounting filesystem read-only",
        "Out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:1kB",
    ]
    lines = [*rare, *[exception, disk] * 500]
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/uptime").write_text("1000.0 1.0\n")
    (tmp_path / "dev/kmsg").write_text(
        "".join(f"3,{n},990000000,-;{line}\n" for n, line in enumerate(lines))
    )
    found = kernel_lines(tmp_path, 60.0)

    assert list(found[:3]) == rare
    assert len(found) < len(lines)
    short = within(NodeTold(node="n1", kernel=found), 1 << 10)
    assert set(read_back(short).kernel) == {*rare, exception, disk}


def read_back(message: Iterable[bytes]) -> NodeTold:
    """Return what a message of lines says."""
    reader = MessageReader[NodeTold](JsonDecoder(NodeTold))
    told = [reader.take(line.rstrip(b"\n")) for line in message][-1]
    assert told is not None
    return told


def test_a_kernel_log_that_may_not_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/uptime").write_text("1000.0 1.0\n")

    with pytest.raises(Unmeasured, match="/dev/kmsg"):
        kernel_lines(tmp_path, 60.0)


OWN = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus."
FOREIGN = "NVRM: Xid (PCI:0000:9d:00): 79, pid=9, GPU has fallen off the bus."


def test_an_xid_of_a_gpu_that_another_job_has_is_not_told() -> None:
    told = of_the_job((FOREIGN, OWN, "mce: x"), ("00000000:3B:00.0",), 1)

    assert told == (OWN, "mce: x")


@pytest.mark.parametrize(("buses", "count"), [((), 1), (("00000000:3B:00.0",), 2), ((), None)])
def test_an_xid_is_told_where_the_gpu_may_be_one_that_the_job_has_lost(
    buses: tuple[str, ...], count: int | None
) -> None:
    assert of_the_job((FOREIGN,), buses, count) == (FOREIGN,)


def test_a_gpu_that_is_lost_or_needs_a_reset_is_one_that_no_program_can_use() -> None:
    devices = (
        GpuDevice(index=0, bus="0000:3b:00.0", lost="GPU is lost"),
        GpuDevice(index=1, bus="0000:3c:00.0", recovery_action=1),
        GpuDevice(index=2, bus="0000:3d:00.0", uncorrected=2),
        GpuDevice(index=3, bus="0000:3e:00.0"),
    )
    told = judged(Gpus(driver="1", devices=devices))

    assert told.lost == (
        "GPU 0 (0000:3b:00.0) is lost: GPU is lost",
        "GPU 1 (0000:3c:00.0) needs a reset",
    )
    assert "GPU 2 has 2 uncorrected ECC errors, limit 0 (0000:3d:00)" in told.state[0]


def test_links_that_are_down_are_told_and_those_that_nobody_uses_are_not(tmp_path: Path) -> None:
    files = {
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp",
        "infiniband/mlx5_0/ports/1/counters/link_downed": "3",
        "infiniband/mlx5_1/ports/1/state": "1: DOWN",
        "infiniband/mlx5_1/ports/1/phys_state": "3: Disabled",
        "net/eth0/operstate": "up",
        "net/eth0/flags": "0x1003",
        "net/eth0/device/vendor": "0x15b3",
        "net/eth1/operstate": "down",
        "net/eth1/flags": "0x1003",
        "net/eth1/device/vendor": "0x15b3",
        "net/eth2/operstate": "down",
        "net/eth2/flags": "0x1002",
        "net/eth2/device/vendor": "0x15b3",
        "net/docker0/operstate": "down",
        "net/docker0/flags": "0x1003",
    }
    for name, text in files.items():
        path = tmp_path / "sys/class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    assert links(tmp_path) == (
        "mlx5_0:1 has lost its link 3 times",
        "mlx5_1:1 is DOWN, Disabled",
        "eth1 has no link",
    )


def test_a_node_tells_what_it_can_see_and_why_not_the_rest(tmp_path: Path) -> None:
    told = node_state(
        job="12", node="n1", began_s=time.time(), directory=tmp_path / "gone", ended=True
    )

    assert told.node == "n1"
    assert f"{tmp_path}/gone: No such file or directory" in told.state
    assert "memory kills" in told.not_seen


def test_a_message_that_is_too_long_loses_dumps_first_and_then_older_lines() -> None:
    flights = tuple(
        FlightRecord(rank=rank, members={os.urandom(40).hex(): (rank,)}) for rank in range(499)
    )
    kernel = tuple(os.urandom(140).hex() for _ in range(40))
    whole = NodeTold(node="n1", kernel=kernel, flights=flights)

    def read(most_bytes: int) -> NodeTold:
        return read_back(within(whole, most_bytes))

    assert read(1 << 20) == whole
    without = msgspec.structs.replace(whole, flights=(), not_seen={"dumps": "too long to be sent"})
    assert read(16 << 10) == without
    assert read(1 << 10).kernel == kernel[-5:]
