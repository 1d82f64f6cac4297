# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.monitor.collector import EndedJob, NothingCollected
from slurm_health.training.monitor.flight_dumps import FlightDumps
from slurm_health.training.monitor.job_output import JOB_TAIL_BYTES, JobOutput, tail
from slurm_health.training.monitor.kernel import KernelLog, MemoryKills
from slurm_health.training.monitor.slurm_word import SlurmWord
from slurm_health.training.monitor.srun_output import glob_of, patterns_in

TRACEBACK = "Traceback (most recent call last):\n  File 'x'\nKeyError: 'lr'\n"
ENVIRON = {
    "SLURM_JOB_ID": "12",
    "SLURM_ARRAY_JOB_ID": "10",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_JOB_NAME": "train",
}


def job(directory: Path, **changes: Any) -> EndedJob:
    given: dict[str, Any] = {
        "end": ScriptEnd(exit_code=1, nodes=("n1",)),
        "environ": {"SLURM_JOB_ID": "12"},
        "node": "n1",
        "directory": directory,
        "ended_s": 2e9,
        "duration_s": 2e9,
    }
    return EndedJob(**{**given, **changes})


# --- the job's output --------------------------------------------------------------------------


def test_the_end_of_a_file_of_gigabytes_is_read_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as file:
        file.truncate(5 << 30)  # sparse
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + TRACEBACK.encode())
    log = JobOutput().collect_data(job(tmp_path, outputs=(path,)))

    assert log.cut
    assert [each.error for each in log.failures] == ["KeyError: 'lr'"]
    assert len(tail(path, JOB_TAIL_BYTES)[0]) == JOB_TAIL_BYTES


def test_output_that_is_not_text_is_read_as_far_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"\xff\xfe\0" * 100 + b"\n" + TRACEBACK.encode())

    assert JobOutput().collect_data(job(tmp_path, outputs=(path,))).failures


def test_a_fifo_in_place_of_a_file_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out")

    with pytest.raises(NothingCollected, match="no plain file"):
        JobOutput().collect_data(job(tmp_path, outputs=(tmp_path / "out",)))


@pytest.mark.root
@pytest.mark.parametrize("link", [False, True])
def test_what_another_lays_under_a_name_of_an_sruns_output_is_passed_over(
    tmp_path: Path, link: bool
) -> None:
    """In /tmp, say: it would tell its own story of why the job failed."""
    (tmp_path / "elsewhere").write_text(TRACEBACK)
    laid = tmp_path / "task-0.txt"
    if link:
        laid.symlink_to("elsewhere")
    else:
        laid.write_text(TRACEBACK)
    os.chown(laid, 1, 1, follow_symlinks=False)
    ended = job(tmp_path, script_text="srun -o task-%t.txt x")

    with pytest.raises(NothingCollected, match="no output file"):
        JobOutput().collect_data(ended)

    os.chown(laid, 0, 0, follow_symlinks=False)
    assert JobOutput().collect_data(ended).failures


def test_output_that_was_removed_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(NothingCollected, match="No such file"):
        JobOutput().collect_data(job(tmp_path, outputs=(tmp_path / "gone",)))


def test_a_job_without_files_has_no_output_to_read(tmp_path: Path) -> None:
    assert not JobOutput().is_enabled(job(tmp_path))
    assert "no files" in JobOutput().is_enabled(job(tmp_path)).why_not


def test_the_files_that_srun_wrote_for_each_task_are_read(tmp_path: Path) -> None:
    logs = tmp_path / "logs [1]"
    logs.mkdir()
    for task in range(3):
        (logs / f"12-{task}.txt").write_text(TRACEBACK if task == 2 else "well\n")
    (logs / "11-0.txt").write_text(TRACEBACK)
    script = "#!/bin/bash\nsrun --output='logs [1]/%j-%t.txt' python train.py\n"
    log = JobOutput().collect_data(job(tmp_path, script_text=script))

    assert [Path(source).name for source in log.sources] == ["12-0.txt", "12-1.txt", "12-2.txt"]
    assert len(log.failures) == 1


def test_a_file_of_an_earlier_job_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "task-0.txt").write_text(TRACEBACK)
    os.utime(tmp_path / "task-0.txt", (1e9, 1e9))
    late = job(tmp_path, script_text="srun -o task-%t.txt x", duration_s=60.0)

    with pytest.raises(NothingCollected):
        JobOutput().collect_data(late)


@pytest.mark.parametrize(
    ("line", "patterns"),
    [
        ("srun --output=a.%j --error b.%t python x", ["a.%j", "b.%t"]),
        ("srun -o a -eb python x", ["a", "b"]),
        ('exec srun -N2 --output="$HOME/my logs/%x" python x', ["$HOME/my logs/%x"]),
        ("srun \\\n  --output=a \\\n  python x", ["a"]),
        ("# srun --output=a", []),
        ("srun --output='a", ["'a"]),
        ("python --output=a", []),
    ],
)
def test_the_options_of_srun_are_found_in_a_script(line: str, patterns: list[str]) -> None:
    assert list(patterns_in(line)) == patterns


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("out-%j.txt", "out-12.txt"),
        ("%A_%a.txt", "10_3.txt"),
        ("%x-%5j.txt", "train-00012.txt"),
        ("out-%t.txt", "out-[0-9]*.txt"),
        ("out-%N.%n.%s", "out-*.[0-9]*.[0-9]*"),
        ("%J.txt", "12.*.txt"),
        ("100%%.txt", "100%.txt"),
        ("a[1]*.txt", "a[[]1][*].txt"),
        ("$SLURM_JOB_ID/${SLURM_JOB_NAME}.txt", "12/train.txt"),
        ("$RUN/x.txt", "*/x.txt"),
        (r"a\%j", "a%j"),
        ("/dev/null", ""),
        ("none", ""),
        ("%t", ""),
        ("logs/%N%t", ""),
    ],
)
def test_a_pattern_of_srun_becomes_the_names_of_its_files(pattern: str, name: str) -> None:
    assert glob_of(pattern, ENVIRON) == name


# --- the kernel --------------------------------------------------------------------------------


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
from slurm_health.training.monitor.kernel import MemoryKills
from tests.training.monitor.test_collectors import job
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


# --- Slurm and the Flight Recorder -------------------------------------------------------------


def test_outside_a_job_slurm_is_not_asked(tmp_path: Path) -> None:
    assert not SlurmWord().is_enabled(job(tmp_path, environ={}))


def test_slurm_is_not_asked_where_it_cannot_know_more_than_the_script(tmp_path: Path) -> None:
    def asked(**end: Any) -> bool:
        return bool(SlurmWord().is_enabled(job(tmp_path, end=ScriptEnd(**end))))

    assert not asked(exit_code=1, nodes=("n1",))
    assert asked(exit_code=143, nodes=("n1",))
    assert asked(exit_code=137, signal=9, nodes=("n1",))
    assert asked(exit_code=1, nodes=("n1", "n2"))


def dump(*whats: str) -> dict[str, Any]:
    return {
        "version": "2.10",
        "entries": [
            {
                "process_group": ("0", "default_pg"),
                "collective_seq_id": number,
                "profiling_name": f"gloo:{what}",
                "input_sizes": [[3]],
                "state": "scheduled",
                "retired": False,
                "is_p2p": False,
            }
            for number, what in enumerate(whats)
        ],
    }


def test_the_dumps_of_ranks_are_read(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"flight_{rank}").write_bytes(pickle.dumps(dump("all_reduce", "barrier")))
    (tmp_path / "flight_x").write_bytes(b"")
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}
    found = FlightDumps().collect_data(job(tmp_path, environ=environ))

    assert [record.rank for record in found.records] == [0, 1]
    first, second = found.records[0].operations
    assert (first.what, first.sizes, second.what, second.sizes) == (
        "all_reduce",
        "[[3]]",
        "barrier",
        "",
    )


RECORDS = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(5))
open(sys.argv[1] + "/flight_0", "wb").write(torch._C._distributed_c10d._dump_fr_trace())
"""


@pytest.mark.torch
def test_a_dump_that_torch_itself_made_is_read(tmp_path: Path) -> None:
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    subprocess.run([sys.executable, "-c", RECORDS, str(tmp_path)], env=environ, check=True)
    told = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}
    (record,) = FlightDumps().collect_data(job(tmp_path, environ=told)).records

    last = record.operations[-1]
    assert (last.group, last.what, last.sizes) == ("0 (gloo)", "all_reduce", "[[5]]")
    assert [each.sequence for each in record.operations[-3:]] == [
        last.sequence - 2,
        last.sequence - 1,
        last.sequence,
    ]


class Bomb:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


def test_a_dump_that_would_run_something_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    (tmp_path / "flight_0").write_bytes(pickle.dumps({"entries": [Bomb(trace)]}))
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}

    with pytest.raises(NothingCollected, match="which no dump does"):
        FlightDumps().collect_data(job(tmp_path, environ=environ))
    assert not trace.exists()


READS_A_DUMP = """
import resource, sys
from pathlib import Path
from slurm_health.training.monitor.collector import NothingCollected
from slurm_health.training.monitor.flight_dumps import FlightDumps
from tests.training.monitor.test_collectors import job
told = {"TORCH_FR_DUMP_TEMP_FILE": sys.argv[1] + "/flight_"}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    FlightDumps().collect_data(job(Path(sys.argv[1]), environ=told))
except NothingCollected as err:
    print("MemoryError" in str(err))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_damaged_dump_takes_no_gigabytes(tmp_path: Path) -> None:
    # None, to be remembered under the number 2^26: the reader makes a list of twice as many.
    (tmp_path / "flight_0").write_bytes(b"\x80\x02Nr" + (1 << 26).to_bytes(4, "little") + b".")
    argv = [sys.executable, "-c", READS_A_DUMP, str(tmp_path)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == "True"
    assert int(said[1]) < 256 << 10  # kB


def test_without_dumps_the_flight_recorder_says_how_to_get_them(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}

    assert (
        "--flight-recorder=on" in FlightDumps().is_enabled(job(tmp_path, environ=environ)).why_not
    )
