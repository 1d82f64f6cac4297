# SPDX-License-Identifier: Apache-2.0

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.records.errors import Unmeasured
from slurm_health.system.nvml import GpuDevice, Gpus
from slurm_health.training.diagnosis.collected import FlightRecord, NodeState, ScriptEnd
from slurm_health.training.monitor.every_node import EveryNode
from slurm_health.training.monitor.node_state import (
    judged,
    kernel_lines,
    links,
    memory_kills,
    most_telling,
    of_the_job,
    within,
)
from tests.support.ended_jobs import job
from tests.support.rows import rows
from tests.support.supervised import write_executable


def cgroup(root: Path, controllers: str, mount: str) -> Path:
    """Return the directory of the memory cgroup of job 12, of which this process is part."""
    (root / "proc/self").mkdir(parents=True)
    inside = "/slurm/uid_1000/job_12"
    (root / "proc/self/cgroup").write_text(f"3:cpu:/\n{controllers}{inside}/step_batch/task_0\n")
    directory = root / f"{mount}{inside}"
    directory.mkdir(parents=True)
    return directory


@rows
def test_kills_for_memory_are_counted_in_the_cgroup_of_the_whole_job(
    tmp_path: Path, controllers: str, mount: str, events: str, limit: str
) -> None:
    directory = cgroup(tmp_path, controllers, mount)
    (directory / events).write_text("oom 2\noom_kill 2\n")
    (directory / limit).write_text("1000000\n")
    counted = memory_kills(tmp_path, "12")

    assert (counted.kills, counted.limit_bytes) == (2, 1_000_000)


def test_kills_are_not_counted_where_steps_count_for_themselves_or_the_job_has_no_cgroup(
    tmp_path: Path,
) -> None:
    """In version 1 of cgroups a kill counts in the cgroup of the killed, and in none above."""
    directory = cgroup(tmp_path, "5:memory:", "sys/fs/cgroup/memory")
    (directory / "memory.oom_control").write_text("oom_kill_disable 0\noom_kill 0\n")
    with pytest.raises(Unmeasured, match="every step counts for itself"):
        memory_kills(tmp_path, "12")
    with pytest.raises(Unmeasured, match="no memory cgroup"):
        memory_kills(tmp_path, "13")


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


def kernel_log(root: Path, lines: Iterable[str], age_s: float = 60.0) -> tuple[str, ...]:
    """Return what matters of lines that the kernel has written, of a script that ran so long."""
    (root / "dev").mkdir()
    (root / "proc").mkdir()
    (root / "proc/uptime").write_text("1000.0 1.0\n")
    (root / "dev/kmsg").write_text("".join(f"{line}\n" for line in lines))
    return kernel_lines(root, age_s)


def test_what_the_kernel_said_since_the_script_began_is_collected(tmp_path: Path) -> None:
    lines = [
        "3,1,100000000,-;NVRM: Xid (PCI:0000:3b:00): 79, of an earlier job",
        "3,2,990000000,-;NVRM: Xid (PCI:0000:3b:00): 48, pid=1",
        "3,3,995000000,-;something else",
        "6,4,995000000,-;x[7]: segfault at 0 ip 0 sp 0 error 4 in I/O error[400000+1000]",
        "6,5,995000000,-;traps: SXid[7] trap divide error ip:0 sp:0 error:0 in x[400000+1000]",
    ]
    assert kernel_log(tmp_path, lines) == ("NVRM: Xid (PCI:0000:3b:00): 48, pid=1",)
    (tmp_path / "dev/kmsg").unlink()
    with pytest.raises(Unmeasured, match="/dev/kmsg"):
        kernel_lines(tmp_path, 60.0)


LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=x, GPU has fallen off the bus."
LINK = "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT  {word} XC0 i0 Link 01 (0x0)"
READ_ONLY = "EXT4-fs (sda1): Remounting filesystem read-only"
KILLED = "Out of memory: Killed process 77 (python) total-vm:1kB, anon-rss:1kB"
EXCEPTION = "NVRM: Xid (PCI:0000:86:00): 13, pid=77, name=python, Graphics SM Exception"
DISK = "I/O error, dev sda, sector 8"
ALL = [LOST, READ_ONLY, KILLED, EXCEPTION, DISK, LINK.format(word="Fatal"), "of no kind"]


def test_a_flood_of_harmless_lines_hides_no_fault_from_the_job(tmp_path: Path) -> None:
    rare = [LOST, READ_ONLY, KILLED]
    lines = [*rare, *[EXCEPTION, DISK] * 500]
    kept = kernel_log(tmp_path, (f"3,{n},990000000,-;{line}" for n, line in enumerate(lines)))

    assert list(kept[:3]) == rare
    assert len(kept) < len(lines)
    short = within(NodeState(node="n1", kernel=kept), 1 << 10)
    assert set(short.kernel) == {*rare, EXCEPTION, DISK}


@rows
def test_a_line_of_its_kind_stays_beside_many_of_another(rare: str, many: str) -> None:
    assert most_telling([rare, *[many] * 200], 40) == (rare, *[many] * 39)
    assert most_telling([*[many] * 200, rare], 40) == (*[many] * 39, rare)


def test_faults_come_first_where_there_is_no_room_for_every_kind() -> None:
    assert most_telling([READ_ONLY, LOST, DISK, KILLED, EXCEPTION], 2) == (READ_ONLY, LOST)
    assert most_telling([READ_ONLY, LOST, DISK, KILLED], 3) == (READ_ONLY, LOST, KILLED)


@given(lines=st.lists(st.sampled_from(ALL) | st.text()), most=st.integers(0, 20))
def test_lines_keep_their_order_and_as_many_as_there_is_room_for(
    lines: list[str], most: int
) -> None:
    kept = most_telling(lines, most)
    rest = iter(lines)

    assert len(kept) == min(most, len(lines))
    assert all(line in rest for line in kept)


OWN = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus."
FOREIGN = "NVRM: Xid (PCI:0000:9d:00): 79, pid=9, GPU has fallen off the bus."


@rows
def test_an_xid_of_a_gpu_that_another_job_has_is_left_out(
    buses: tuple[str, ...], count: int | None, kept: tuple[str, ...]
) -> None:
    assert of_the_job((FOREIGN, OWN, "mce: x"), buses, count) == kept


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


def test_a_message_that_is_too_long_loses_dumps_first_and_then_older_lines() -> None:
    flights = tuple(
        FlightRecord(rank=rank, members={os.urandom(40).hex(): (rank,)}) for rank in range(499)
    )
    kernel = tuple(os.urandom(140).hex() for _ in range(40))
    whole = NodeState(node="n1", kernel=kernel, flights=flights)

    assert within(whole, 1 << 20) == whole
    without = msgspec.structs.replace(
        whole, flights=(), unavailable={"dumps": "too long to be sent"}
    )
    assert within(whole, 16 << 10) == without
    assert within(whole, 1 << 10).kernel == kernel[-5:]


# Runs the command on n2, and says what the real one says of a node that is lost.
SRUN = """#!/bin/sh
echo "srun: error: Task launch for StepId=12.3 failed on node n3: No route to host" >&2
until [ "$1" = --job-name=slurm-health-step ]; do shift; done
shift
SLURMD_NODENAME=n2 "$@" </dev/null
exit 1
"""


def test_after_a_failure_all_nodes_answer_but_one_that_srun_does_not_reach(tmp_path: Path) -> None:
    write_executable(tmp_path / "srun", SRUN)
    environ = {"SLURM_JOB_ID": "12", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    end = ScriptEnd(exit_code=1, nodes=("n1", "n2", "n3"))
    told = EveryNode(job(tmp_path, environ=environ, end=end)).collect_data()

    assert [state.node for state in told.nodes] == ["n1", "n2"]
    assert (told.silent, told.why_silent[:23]) == (("n3",), "srun: error: Task launc")
