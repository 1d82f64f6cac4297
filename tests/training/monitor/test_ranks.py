# SPDX-License-Identifier: Apache-2.0
"""Real processes with a heartbeat, as the agent of their node sees them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_health.training.diagnosis.samples import Doing, RankSample, place_of
from slurm_health.training.monitor.ranks import Ranks, located

JOB = str(os.getpid())  # other processes that run these tests have jobs of their own
DEADLINE_S = 30.0
TRAINING = """
import os, sys, time
from pathlib import Path
from slurm_health import heartbeat
here = Path(sys.argv[1])
for step in range(int(sys.argv[2])):
    heartbeat.step(step, 0.25)
child = os.fork() if sys.argv[3] == "fork" else 0
if child == 0:
    (here / "there").touch()
if child == 0 and sys.argv[3] == "fork":
    time.sleep(600)
def wait_for_data():
    os.read(os.pipe()[0], 1)
wait_for_data()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a training with a heartbeat; it has done its steps when this returns."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(
        steps: int = 5, how: str = "", script: str = TRAINING, **environ: str
    ) -> subprocess.Popen[bytes]:
        here = tmp_path / str(len(started))
        here.mkdir()
        told = {"SLURM_JOB_ID": JOB, "SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "3", **environ}
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", script, str(here), str(steps), how],
                env={**os.environ, **told},
                start_new_session=True,
            )
        )
        eventually(lambda: (here / "there").exists())
        return started[-1]

    yield begin
    for each in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)
        each.wait()


def eventually(holds: Callable[[], Any]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def found(own_step: str = "9") -> Ranks:
    ranks = Ranks(JOB, "n1", own_step)
    ranks.find()
    return ranks


def inspected(ranks: Ranks) -> RankSample:
    samples = ranks.sample()
    (sample,) = located(samples, ranks.locate(again=True)[0])
    return sample


def test_a_rank_is_found_by_its_heartbeat_with_its_step_and_pace(start: Any) -> None:
    process = start(RANK="7")
    (now,) = found().sample()

    assert (now.program, now.rank, now.pid) == ("3", 7, process.pid)
    assert (now.step, now.steps, now.own_steps) == (4, 5, 5)
    assert now.own_s == pytest.approx(1.25)
    assert 0 <= now.typical_s <= now.longest_s + 1e-3
    assert now.age_s >= 0


def test_without_torchrun_the_rank_is_that_of_sruns_task(start: Any) -> None:
    start(SLURM_PROCID="2")

    assert [now.rank for now in found().sample()] == [2]


def test_outside_slurm_a_rank_is_known_by_the_mark_of_its_training(start: Any) -> None:
    mine = start(SLURM_JOB_ID="", SLURMD_NODENAME="node0", SLURM_HEALTH_TRAINING=JOB, RANK="1")
    start(SLURM_JOB_ID="", SLURMD_NODENAME="node0", SLURM_HEALTH_TRAINING="of another", RANK="0")
    ranks = Ranks(JOB, "node0", "", variable="SLURM_HEALTH_TRAINING")
    ranks.find()

    assert [(now.pid, now.rank) for now in ranks.sample()] == [(mine.pid, 1)]


LOADING = """
import os, sys, time
from pathlib import Path
from slurm_health import heartbeat
def batches():
    for step in range(int(sys.argv[2])):
        time.sleep(0.02)
        yield step
    if sys.argv[3] == "more":
        (Path(sys.argv[1]) / "there").touch()
        time.sleep(600)
for step in heartbeat.loading(batches()):
    heartbeat.step(step, 0.25)
(Path(sys.argv[1]) / "there").touch()
time.sleep(600)
"""


@pytest.mark.parametrize(("how", "ended"), [("", True), ("more", False)])
def test_a_rank_tells_how_long_it_waited_for_its_data_and_whether_that_ended(
    start: Any, how: str, ended: bool
) -> None:
    start(how=how, script=LOADING, RANK="0")
    (now,) = found().sample()

    assert (now.step, now.batches, now.data_ended) == (4, 5, ended)
    assert now.loading_s >= 0.1
    # What it waited for its data is its own.
    assert now.own_s == pytest.approx(1.25 + now.loading_s, abs=1e-3)


WITH_A_CHILD = """
import os, sys, time
from pathlib import Path
if os.fork() == 0:
    Path("/dev/null").write_bytes(bytes(1 << 20))
    (Path(sys.argv[1]) / "there").touch()
    time.sleep(600)
os.wait()
"""


def test_what_children_write_is_the_ranks_and_its_own_waits_are_counted(start: Any) -> None:
    process = start(script=WITH_A_CHILD, SLURM_PROCID="2")
    ranks = found()
    (sample,) = ranks.sample()

    assert (sample.rank, sample.pid) == (2, process.pid)
    assert sample.io_bytes >= 1 << 20
    assert sample.wakes > 0
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert ranks.sample() == []


def test_the_kernel_counts_how_long_a_rank_ran(start: Any) -> None:
    start(RANK="0")
    (now,) = found().sample()

    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count it")
    assert now.ran_s > 0
    assert now.unserved_s >= 0


@pytest.mark.parametrize(
    "environ",
    [{"SLURM_JOB_ID": "1"}, {"SLURMD_NODENAME": "n2"}, {"SLURM_STEP_ID": "9"}],
    ids=["another job", "another node", "our own step"],
)
def test_what_is_not_of_this_job_and_node_is_passed_over(
    start: Any, environ: dict[str, str]
) -> None:
    start(**environ)

    assert found().sample() == []


def test_of_a_job_with_several_trainings_one_step_alone_is_watched(start: Any) -> None:
    mine = start(RANK="0")
    start(SLURM_STEP_ID="4", RANK="0")
    start(SLURM_STEP_ID="", RANK="0")
    ranks = Ranks(JOB, "n1", "3", only_step="3")
    ranks.find()

    assert [now.pid for now in ranks.sample()] == [mine.pid]


def test_a_process_outside_any_step_is_the_scripts_own(start: Any) -> None:
    start(SLURM_STEP_ID="")

    assert [now.program for now in found().sample()] == ["script"]


def test_a_rank_tells_where_its_main_thread_is(start: Any) -> None:
    start(RANK="0")
    look = inspected(found())

    assert look.answered
    assert [frame.function for frame in look.stack] == ["<module>", "wait_for_data"]
    assert place_of(look.stack).doing is Doing.OWN_CODE


def test_a_stopped_rank_does_not_answer_and_is_seen_to_be_stopped(start: Any) -> None:
    process = start(RANK="0")
    ranks = found()
    os.kill(process.pid, signal.SIGSTOP)
    eventually(lambda: ranks.sample()[0].state == "T")
    look = inspected(ranks)

    assert not look.answered


def test_a_rank_that_has_ended_is_no_longer_there(start: Any) -> None:
    process = start(RANK="0")
    ranks = found()
    process.kill()
    process.wait()

    assert ranks.sample() == []
    assert ranks.locate(again=True) == ({}, {})


def test_a_forked_child_is_no_rank_and_dies_unnoticed_with_none(start: Any) -> None:
    """A data loader's worker may outlive its rank: that rank is gone all the same."""
    process = start(how="fork", RANK="0")
    ranks = found()
    assert [now.pid for now in ranks.sample()] == [process.pid]
    process.kill()
    process.wait()
    ranks.find()

    assert ranks.sample() == []


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
    _dump_nccl_trace_json=hangs if sys.argv[3] == "hangs" else record(
        *(entry("nccl:all_reduce", number, number < 41) for number in range(42))
    ),
)
heartbeat.step(1)
(Path(sys.argv[1]) / "there").touch()
time.sleep(600)
"""


def test_what_nccl_recorded_is_told_beside_what_others_did(start: Any) -> None:
    start(RANK="0", script=TORCH_WITH_NCCL)
    look = inspected(found())

    assert look.flight is not None
    latest = {each.group: each for each in look.flight.operations}
    assert set(latest) == {"0 (gloo)", "0 (nccl)"}
    nccl = latest["0 (nccl)"]
    assert (nccl.sequence, nccl.what, nccl.state) == (41, "all_reduce", "started")
    assert latest["0 (gloo)"].state == "retired"


def test_a_rank_whose_driver_hangs_tells_where_it_is_all_the_same(start: Any) -> None:
    start(how="hangs", RANK="0", script=TORCH_WITH_NCCL)
    ranks = found()
    eventually(lambda: inspected(ranks).answered)
    # However often: the thread that asks the driver is left behind.
    eventually(lambda: inspected(ranks).answered)
    look = inspected(ranks)

    assert look.flight is None


def test_a_number_that_is_another_file_by_now_is_not_written_to(start: Any, tmp_path: Path) -> None:
    kept = tmp_path / "checkpoint"
    kept.write_text("weights")
    spoilt = TRAINING.replace(
        "def wait_for_data():",
        """
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
(here / "spoilt").touch()
def wait_for_data():""",
    )
    start(script=spoilt, RANK="0", KEPT=str(kept))
    eventually(lambda: any(tmp_path.glob("*/spoilt")))
    look = inspected(found())

    assert not look.answered
    assert kept.read_text() == "weights"
