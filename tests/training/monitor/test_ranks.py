# SPDX-License-Identifier: Apache-2.0
"""Real processes with and without a heartbeat, as the agent of their node sees them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_health.preflight.supervisor.monitor_process import flight_environ
from slurm_health.system import proc
from slurm_health.training.diagnosis.samples import LAUNCHERS, Doing, RankSample, place_of
from slurm_health.training.monitor.ranks import (
    SCRIPT,
    JobProcess,
    Ranks,
    located,
    ranks_without_heartbeat,
)
from slurm_health.training.monitor.voices import PIPE, Recorder, find_py_spy, read_stacks
from tests.played_gpu.description import machine, write
from tests.played_gpu.running import start_ranks
from tests.support.rows import rows
from tests.support.supervised import eventually, write_executable

JOB = f"{os.getpid()}7"  # other processes that run these tests have jobs of their own
IN_STEP = {"SLURM_JOB_ID": JOB, "SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "3"}
Start = Callable[..., subprocess.Popen[bytes]]
needs_py_spy = pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")

BEATS = """
import os, sys, time
from pathlib import Path
from slurm_health import heartbeat
for step in range(5):
    heartbeat.step(step, 0.25)
child = os.fork() if sys.argv[2] == "fork" else 0
if child == 0:
    Path(sys.argv[1]).touch()
if child == 0 and sys.argv[2] == "fork":
    time.sleep(600)
def wait_for_data():
    os.read(os.pipe()[0], 1)
wait_for_data()
"""
SILENT = """
import os, sys, time
from pathlib import Path
if sys.argv[2] == "fork":
    os.fork()
if sys.argv[2] == "writes" and os.fork() == 0:
    Path("/dev/null").write_bytes(bytes(1 << 20))
if sys.argv[2] == "contend":
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    if os.fork() == 0 or os.fork() == 0:
        while True:
            pass
Path(sys.argv[1]).touch()
time.sleep(600)
"""
SHELL = '"$PYTHON" "$@"; :'


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a training, by a shell if one is given; it has come to its end when this returns."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(
        script: str = BEATS, how: str = "", shell: str = "", **environ: str
    ) -> subprocess.Popen[bytes]:
        there = tmp_path / f"there-{len(started)}"
        argv = ["-c", script, str(there), how]
        argv = ["/bin/sh", "-c", shell, "sh", *argv] if shell else [sys.executable, *argv]
        # What srun starts leads a process group.
        process = subprocess.Popen(
            argv,
            env={**os.environ, **IN_STEP, "PYTHON": sys.executable, **environ},
            cwd=tmp_path,
            start_new_session=True,
        )
        started.append(process)
        eventually(there.exists, "its end")
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def on_node(own_step: str = "9", **more: Any) -> Ranks:
    ranks = Ranks(JOB, "n1", own_step, **more)
    ranks.find()
    return ranks


def numbers(ranks: Ranks | None = None) -> list[tuple[str, int]]:
    """Return programs and numbers of the ranks on the node."""
    return sorted((sample.program, sample.rank) for sample in (ranks or on_node()).sample())


def inspected(ranks: Ranks) -> RankSample:
    (sample,) = located(ranks.sample(), ranks.locate(again=True)[0])
    return sample


def test_a_rank_is_known_by_its_heartbeat_with_its_step_and_pace(start: Start) -> None:
    process = start(RANK="7")
    (sample,) = on_node().sample()

    assert (sample.program, sample.rank, sample.pid) == ("3", 7, process.pid)
    assert (sample.step, sample.steps, sample.own_steps) == (4, 5, 5)
    assert sample.own_s == pytest.approx(1.25)
    assert 0 <= sample.typical_s <= sample.longest_s + 1e-3
    assert sample.age_s >= 0


@rows
def test_a_rank_belongs_to_a_step_of_this_job_on_this_node(
    start: Start, environ: dict[str, str], rank: list[tuple[str, int]]
) -> None:
    start(**environ)

    assert numbers() == rank


def test_outside_slurm_a_rank_is_known_by_the_mark_of_its_training(start: Start) -> None:
    outside = {"SLURM_JOB_ID": "", "SLURMD_NODENAME": "n1", "SLURM_STEP_ID": ""}
    start(**outside, SLURM_HEALTH_TRAINING=JOB, RANK="1")
    start(**outside, SLURM_HEALTH_TRAINING="of another", RANK="0")

    assert numbers(on_node("", variable="SLURM_HEALTH_TRAINING")) == [(SCRIPT, 1)]


def test_of_a_job_with_several_trainings_one_step_alone_is_watched(start: Start) -> None:
    start(RANK="0")
    start(SLURM_STEP_ID="4", RANK="1")
    start(SLURM_STEP_ID="", RANK="2")

    assert numbers(on_node("3", only_step="3")) == [("3", 0)]


LOADING = """
import sys, time
from pathlib import Path
from slurm_health import heartbeat
def batches():
    for step in range(5):
        time.sleep(0.02)
        yield step
    if sys.argv[2] == "more":
        Path(sys.argv[1]).touch()
        time.sleep(600)
for step in heartbeat.loading(batches()):
    heartbeat.step(step, 0.25)
Path(sys.argv[1]).touch()
time.sleep(600)
"""


@pytest.mark.parametrize(("how", "ended"), [("", True), ("more", False)])
def test_a_heartbeat_has_how_long_a_rank_waited_for_its_data_and_whether_that_ended(
    start: Start, how: str, ended: bool
) -> None:
    start(LOADING, how, RANK="0")
    (sample,) = on_node().sample()

    assert (sample.step, sample.batches, sample.data_ended) == (4, 5, ended)
    assert sample.loading_s >= 0.1
    # What it waited for its data is its own.
    assert sample.own_s == pytest.approx(1.25 + sample.loading_s, abs=1e-3)


TOLD = """
heartbeat.role("stage 3", replica=5)
for step in range(4):
    heartbeat.step(step, 0.25, tokens=4096)
"""
# The ranks of a pipeline of two stages, of which this is one, and no other runs.
GROUPS = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group(backend="fake", rank=2, world_size=4, store=FakeStore())
for ranks in ([0, 2], [1, 3]):
    dist.new_group(ranks, group_desc="PIPELINE_MODEL_PARALLEL_GROUP")
for ranks in ([0, 1], [2, 3]):
    dist.new_group(ranks, group_desc="DATA_PARALLEL_GROUP")
for step in range(4):
    heartbeat.step(step, 0.25)
"""


@pytest.mark.parametrize(
    ("script", "work"),
    [
        (TOLD, ("stage 3", 5, 4 * 4096.0)),
        pytest.param(GROUPS, ("pipeline 1", 0, 0.0), marks=pytest.mark.torch),
    ],
)
def test_a_rank_has_its_role_by_its_script_or_by_its_process_groups(
    start: Start, script: str, work: tuple[str, int, float]
) -> None:
    head = "import sys, time\nfrom pathlib import Path\nfrom slurm_health import heartbeat\n"
    start(f"{head}{script}\nPath(sys.argv[1]).touch()\ntime.sleep(600)", RANK="2")
    (sample,) = on_node().sample()

    assert (sample.role, sample.replica, sample.tokens) == work


@pytest.mark.parametrize("how", ["", "fork"])
def test_a_rank_without_a_heartbeat_is_what_the_shell_of_its_task_runs(
    start: Start, how: str
) -> None:
    shell = start(SILENT, how, SHELL, SLURM_PROCID="2")
    (sample,) = on_node().sample()

    assert (sample.program, sample.rank, sample.steps, sample.age_s) == ("3", 2, 0, 0.0)
    assert sample.pid != shell.pid


def test_torchruns_workers_are_ranks_and_torchrun_itself_only_before_it_starts_them(
    start: Start, tmp_path: Path
) -> None:
    workers = 'export SLURM_PROCID=0; RANK=4 "$PYTHON" "$@" & RANK=5 "$PYTHON" "$@" & wait'
    start(SILENT, shell=workers, WORLD_SIZE="8")
    eventually(lambda: len(numbers()) == 2, "two workers")
    assert {sample.world for sample in on_node().sample()} == {8}
    assert numbers() == [("3", 4), ("3", 5)]

    for task, name in (("2", "torchrun"), ("3", "slurm-health")):
        path = tmp_path / name
        path.write_text(SILENT)
        argv = f'{path} "$3" "" --rdzv_endpoint=n1:29400'
        start(SILENT, shell=f'"$PYTHON" {argv}; :', SLURM_PROCID=task, SLURM_STEP_ID="4")
    assert numbers() == [("3", 4), ("3", 5), (f"4{LAUNCHERS}", 2)]
    assert on_node().sample()[-1].meets == "n1:29400"


@pytest.mark.parametrize("environ", ["", "RANK=5 WORLD_SIZE=6"])
def test_a_rank_in_a_container_that_hides_the_jobs_environment_is_of_the_task_that_started_it(
    start: Start, environ: str
) -> None:
    namespaces = "unshare --user --map-root-user --pid --fork --mount-proc /bin/sh -c"
    contained = f"""env -i {environ} {namespaces} '"$@"; :' sh "$PYTHON" "$@"; :"""
    start(SILENT, shell=contained, SLURM_PROCID="2", SLURM_NTASKS="3")
    (sample,) = on_node().sample()

    assert (sample.program, sample.rank) == ("3", 5 if environ else 2)
    assert sample.world == (6 if environ else 3)
    assert inspected(on_node()).pid == sample.pid


def test_a_process_that_no_task_started_is_of_the_step_that_its_cgroup_names(
    start: Start,
) -> None:
    """A container's monitor leaves the step's processes; Slurm's cgroup holds it all the same."""
    process = start(SILENT)
    ranks = on_node()
    now = proc.stat(Path(f"/proc/{process.pid}"))

    def of(cgroup: str) -> str | None:
        own = ranks.contained(now, {"RANK": "4"}, None, cgroup=f"0::/slurm/{cgroup}")
        return own and f"{own.program} {own.rank}"

    assert of(f"uid_0/job_{JOB}/step_0/task_0") == "0 4"
    assert of(f"job_{JOB}/step_batch/user") == f"{SCRIPT} 4"
    assert [of(f"job_{JOB}/step_9"), of("job_1/step_0"), of("")] == [None] * 3


def test_mpiruns_ranks_are_one_program_with_its_numbers_and_its_daemons_are_no_ranks(
    start: Start,
) -> None:
    """In the batch script and in a step of its daemons, where all have one SLURM_PROCID."""
    of_mpi = "OMPI_COMM_WORLD_SIZE=3 PMIX_NAMESPACE=7 OMPI_COMM_WORLD_RANK"
    start(SILENT, shell=f'{of_mpi}=0 "$PYTHON" "$@"; :', SLURM_STEP_ID="", SLURM_PROCID="0")
    start(
        SILENT,
        shell=f'{of_mpi}=1 "$PYTHON" "$@" & {of_mpi}=2 "$PYTHON" "$@" & wait',
        SLURM_PROCID="1",
    )
    eventually(lambda: len(numbers()) == 3, "three ranks")

    assert numbers() == [("mpirun 7", rank) for rank in range(3)]
    assert {sample.world for sample in on_node().sample()} == {3}


@pytest.mark.parametrize(
    ("words", "pids"),
    [(["python", "train.py"], [7]), (["python", "-m", "slurm_health"], []), ([""], [])],
)
def test_the_one_training_of_a_script_is_its_rank_and_one_that_is_ending_has_no_command_line(
    tmp_path: Path, words: list[str], pids: list[int]
) -> None:
    (tmp_path / "comm").write_text("python3\n")
    (tmp_path / "cmdline").write_text("\0".join(words))
    process = JobProcess(tmp_path, pid=7, parent=1, group=7, program=SCRIPT, rank=None, task=0)

    assert [rank.pid for rank in ranks_without_heartbeat({7: process}, {}, [])] == pids


@pytest.mark.parametrize("script", [BEATS, SILENT])
def test_a_forked_child_is_no_rank_also_when_its_rank_has_ended(start: Start, script: str) -> None:
    """A data loader's worker may outlive its rank: that rank is gone all the same."""
    process = start(script, "fork", RANK="0")
    ranks = on_node()
    assert [sample.pid for sample in ranks.sample()] == [process.pid]
    process.kill()
    process.wait()
    assert ranks.sample() == []
    assert ranks.locate(again=True) == ({}, {})
    ranks.find()

    assert numbers(ranks) == numbers() == []


# Slurm puts all tasks of a step on a node into the process group of the first.
SLURMSTEPD = """
import contextlib, json, os, sys
environ, *argv = json.loads(sys.argv[1]), *sys.argv[2:]
tasks = []
for task in ("0", "1", "2"):
    tasks.append(os.fork() or os.getpid())
    with contextlib.suppress(PermissionError):  # it has executed its program, and done so itself
        os.setpgid(tasks[-1], tasks[0])
    if tasks[-1] == os.getpid():
        os.execve(argv[0], [*argv[:-1], argv[-1] + task, ""], {**environ, "SLURM_PROCID": task})
for task in tasks:
    os.waitpid(task, 0)
"""


def test_all_tasks_of_a_step_on_a_node_are_ranks(tmp_path: Path) -> None:
    stepd = tmp_path / "slurmstepd"
    stepd.symlink_to(os.path.realpath(sys.executable))
    environ = json.dumps({**os.environ, **IN_STEP})
    argv = [str(stepd), "-c", SLURMSTEPD, environ, sys.executable, "-c", SILENT, f"{tmp_path}/task"]
    process = subprocess.Popen(argv)
    try:
        eventually(lambda: len(list(tmp_path.glob("task*"))) == 3, "all tasks")
        found = numbers()
    finally:
        for task in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(task), signal.SIGKILL)
        process.wait()

    assert found == [("3", 0), ("3", 1), ("3", 2)]


def test_what_children_write_is_the_ranks_and_its_own_waits_are_counted(start: Start) -> None:
    start(SILENT, "writes", SLURM_PROCID="2")
    ranks = on_node()
    eventually(lambda: ranks.sample()[0].io_bytes >= 1 << 20, "the bytes of its child")
    (sample,) = ranks.sample()

    assert sample.wakes > 0
    assert sample.ran_s > 0 or not Path("/proc/self/schedstat").exists()


def test_a_child_that_gets_no_processor_is_not_at_rest(start: Start) -> None:
    process = start(SILENT, "contend", SLURM_PROCID="2")
    ranks = on_node()

    def unserved_s() -> float:
        (sample,) = ranks.sample()
        members = Path(f"/proc/{process.pid}"), *proc.children(Path(f"/proc/{process.pid}"))
        return sample.cpu_s - sum(proc.stat(member).cpu_s for member in members)

    eventually(lambda: unserved_s() > 1, "the wait of two children for one processor")


def test_a_rank_answers_where_its_main_thread_is_unless_it_is_stopped(start: Start) -> None:
    process = start(RANK="0")
    ranks = on_node()
    sample = inspected(ranks)
    assert sample.answered
    assert [frame.function for frame in sample.stack] == ["<module>", "wait_for_data"]
    assert place_of(sample.stack).doing is Doing.OWN_CODE

    os.kill(process.pid, signal.SIGSTOP)
    eventually(lambda: ranks.sample()[0].state == "T", "the stop")
    assert not inspected(ranks).answered


# A torch built with NCCL has two Flight Recorders: NCCL's, and that of every other library.
TORCH_WITH_NCCL = """
import json, sys, time, types
from pathlib import Path
from slurm_health import heartbeat
def entry(name, number, retired):
    return {"profiling_name": name, "process_group": ["0", "default_pg"], "is_p2p": False,
            "collective_seq_id": number, "input_sizes": [[4]], "state": "started",
            "retired": retired}
def record(*entries):
    return lambda: json.dumps({"version": "2.10", "entries": entries}).encode()
def hangs():
    while True:
        time.sleep(1)
torch = sys.modules["torch._C"] = types.ModuleType("torch._C")
torch._distributed_c10d = types.SimpleNamespace(
    _dump_fr_trace_json=record(entry("gloo:allreduce", 3, True)),
    _dump_nccl_trace_json=hangs if sys.argv[2] == "hangs" else record(
        *(entry("nccl:all_reduce", number, number < 41) for number in range(42))
    ),
)
heartbeat.step(1)
Path(sys.argv[1]).touch()
time.sleep(600)
"""


def test_what_nccl_recorded_comes_beside_what_others_did(start: Start) -> None:
    start(TORCH_WITH_NCCL, RANK="0")
    sample = inspected(on_node())

    assert sample.flight is not None
    latest = {operation.group: operation for operation in sample.flight.operations}
    assert set(latest) == {"0 (gloo)", "0 (nccl)"}
    nccl = latest["0 (nccl)"]
    assert (nccl.sequence, nccl.what, nccl.state) == (41, "all_reduce", "started")
    assert latest["0 (gloo)"].state == "retired"


def test_a_rank_whose_driver_hangs_answers_where_it_is_again_and_again(start: Start) -> None:
    start(TORCH_WITH_NCCL, "hangs", RANK="0")
    ranks = on_node()
    # The thread that asks the driver is left behind.
    for _ in range(2):
        eventually(lambda: inspected(ranks).answered, "an answer")

    assert inspected(ranks).flight is None


def test_a_number_that_is_another_file_by_now_is_not_written_to(
    start: Start, tmp_path: Path
) -> None:
    kept = tmp_path / "checkpoint"
    kept.write_text("weights")
    spoils = """
import struct
for entry in os.scandir("/proc/self/fd"):
    if os.readlink(entry.path).startswith("/memfd:" + heartbeat.NAME):
        beat = os.open(entry.path, os.O_RDWR)
        seen = os.pread(beat, heartbeat.LAYOUT.size, 0)
        if len(seen) < heartbeat.LAYOUT.size:
            continue
        data = list(heartbeat.LAYOUT.unpack(seen))
        data[-3] = os.open(os.environ["KEPT"], os.O_RDONLY)
        os.pwrite(beat, heartbeat.LAYOUT.pack(*data), 0)
Path("spoilt").touch()
def wait_for_data():"""
    start(BEATS.replace("def wait_for_data():", spoils), RANK="0", KEPT=str(kept))
    eventually((tmp_path / "spoilt").exists, "the other file")

    assert not inspected(on_node()).answered
    assert kept.read_text() == "weights"


# A thread of torch's does this, here without torch.
ANSWERS = """
import os, pickle, sys, threading, time
from pathlib import Path
rank = os.environ["RANK"]
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
os.mkfifo(pipe)
asked = open(os.open(pipe, os.O_RDWR), "rb", buffering=0)  # who asks finds a reader from now on
entry = {"process_group": ("0", "default_pg"), "collective_seq_id": 7, "retired": False}
entry |= {"profiling_name": "nccl:all_reduce", "input_sizes": [[3]], "state": "started"}
dump = pickle.dumps({"entries": [entry], "pg_config": {}, "version": "2.10"})
def answer():
    assert asked.read(128)[:1] == b"1"
    file = Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank)
    file.write_bytes(dump[:20])
    time.sleep(0.3)
    file.write_bytes(dump)
threading.Thread(target=answer, daemon=True).start()
Path(sys.argv[1]).touch()
time.sleep(600)
"""


def test_a_silent_rank_is_asked_by_its_pipe_and_its_whole_dump_is_read(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "flight-rank-3").write_bytes(b"{}")  # of an earlier attempt
    start(ANSWERS, RANK="3", **flight_environ({}, str(tmp_path)))
    sample = inspected(on_node())

    assert sample.flight is not None
    (operation,) = sample.flight.operations
    assert (sample.flight.rank, operation.sequence, operation.what) == (3, 7, "all_reduce")
    assert not sample.answered


def test_a_silent_rank_without_a_pipe_is_not_waited_for_and_nothing_is_written(
    start: Start, tmp_path: Path
) -> None:
    environ = flight_environ({}, str(tmp_path))
    pipe = tmp_path / "flight-rank-3.pipe"
    pipe.write_text("")
    start(SILENT, RANK="3", **environ)
    assert inspected(on_node()).flight is None
    assert pipe.read_text() == ""

    (tmp_path / "environ").write_text(
        "\0".join(f"{name}={value}" for name, value in environ.items() if name != PIPE)
    )
    assert not Recorder(3, tmp_path).ask()


@pytest.mark.played_gpu
@pytest.mark.timeout(600)
def test_torchs_own_recorder_answers_while_a_rank_waits_for_one_that_does_not_come(
    played_python: Path, tmp_path: Path
) -> None:
    write(tmp_path / "gpus", machine(2, seed=str(tmp_path)))
    variables = flight_environ({}, str(tmp_path), "2.13") | {"LIMIT_S": "600"}
    gpus = tmp_path / "gpus"
    waits, absent = start_ranks(
        played_python, "missing_peer", ["waits"], count=2, gpus=gpus, variables=variables
    )
    with waits.process, absent.process:
        assert waits.process.stdout is not None
        assert waits.process.stdout.readline() == "pending True\n"
        recorders = [
            Recorder(rank, Path(f"/proc/{played.process.pid}"))
            for rank, played in enumerate((waits, absent))
        ]
        for recorder in recorders:
            eventually(recorder.ask, "a thread that reads its pipe")
        eventually(lambda: all(recorder.poll() for recorder in recorders), "both dumps")
        waits.process.kill()
        absent.process.kill()

    entered = [[g.entered for g in r.flight.groups.values()] for r in recorders if r.flight]
    assert entered == [[2], [1]]


@needs_py_spy
@pytest.mark.parametrize("stopped", [False, True])
def test_py_spy_shows_where_a_silent_rank_is_even_when_it_is_stopped(
    start: Start, stopped: bool
) -> None:
    start(SILENT, SLURM_PROCID="0")
    ranks = on_node()
    (sample,) = ranks.sample()
    if stopped:
        os.kill(sample.pid, signal.SIGSTOP)
        eventually(lambda: ranks.sample()[0].state == "T", "the stop")

    # What is read while it moves may be torn.
    eventually(lambda: [f.function for f in inspected(ranks).stack] == ["<module>"], "its stack")


@rows
def test_a_py_spy_that_may_not_look_hangs_or_answers_nonsense_costs_its_stacks_alone(
    tmp_path: Path, text: str, why: str
) -> None:
    program = write_executable(tmp_path / "py-spy", f"#!/bin/sh\n{text}\n")
    stacks = read_stacks([1, 2], wait_s=1.0, command=str(program))

    assert stacks.by_pid == {}
    assert why in stacks.why_not
