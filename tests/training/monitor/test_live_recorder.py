# SPDX-License-Identifier: Apache-2.0
"""Ranks without a heartbeat whose Flight Recorder is asked through the pipe that torch reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.preflight.supervisor.monitor_process import flight_environ
from slurm_health.training.monitor.ranks import Ranks, Whereabouts
from slurm_health.training.monitor.voices import PIPE, Recorder
from tests.played_gpu.description import machine, write
from tests.played_gpu.running import start_ranks
from tests.support.supervised import eventually

JOB = f"{os.getpid()}7"
IN_JOB = {"SLURM_JOB_ID": JOB, "SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "3"}
# A thread of torch's does this, here without torch: argument 2 is what it does about a line.
ANSWERS = """
import os, pickle, sys, threading, time
rank = os.environ["RANK"]
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
os.mkfifo(pipe)
asked = open(os.open(pipe, os.O_RDWR), "rb", buffering=0)  # who asks finds a reader from now on
entry = {"process_group": ("0", "default_pg"), "collective_seq_id": 7, "retired": False}
entry |= {"profiling_name": "nccl:all_reduce", "input_sizes": [[3]], "state": "started"}
dump = pickle.dumps({"entries": [entry], "pg_config": {}, "version": "2.10"})
def write(path, data):
    with open(path, "wb") as file:
        file.write(data)
def answer():
    assert asked.read(128)[:1] == b"1"
    write(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, dump[:20])
    time.sleep(0.3)
    write(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, dump)
threading.Thread(target=answer, daemon=True).start()
open("ready", "w").close()
time.sleep(600)
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    told = flight_environ({}, str(tmp_path)) | IN_JOB | {"RANK": "3"}
    argv = [sys.executable, "-c", ANSWERS]
    # What srun starts leads a process group.
    environ = {**os.environ, **told}
    with subprocess.Popen(argv, env=environ, cwd=tmp_path, process_group=0) as process:
        eventually(lambda: (tmp_path / "ready").exists(), "the reader of the pipe")
        yield process
        process.kill()


def inspected() -> Whereabouts:
    ranks = Ranks(JOB, "n1", "9")
    ranks.find()
    (where,) = ranks.locate(again=True)[0].values()
    return where


def test_a_silent_rank_is_asked_and_its_whole_dump_is_read(
    rank: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (tmp_path / "flight-rank-3").write_bytes(b"{}")  # of an earlier attempt
    look = inspected()

    assert look.flight is not None
    (operation,) = look.flight.operations
    assert (look.flight.rank, operation.sequence, operation.what) == (3, 7, "all_reduce")
    assert not look.answered


def test_a_rank_that_reads_no_pipe_is_not_waited_for_and_nothing_is_written(
    rank: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    pipe = tmp_path / "flight-rank-3.pipe"
    pipe.unlink()
    pipe.write_text("")
    look = inspected()

    assert look.flight is None
    assert pipe.read_text() == ""


def test_a_rank_that_was_told_of_no_pipe_cannot_be_asked(tmp_path: Path) -> None:
    environ = flight_environ({}, str(tmp_path))
    del environ[PIPE]
    (tmp_path / "environ").write_text("\0".join(f"{n}={value}" for n, value in environ.items()))

    assert not Recorder(3, tmp_path).ask()


@pytest.mark.played_gpu
@pytest.mark.timeout(600)
def test_torchs_own_recorder_answers_while_a_rank_waits_for_one_that_does_not_come(
    played_python: Path, tmp_path: Path
) -> None:
    write(tmp_path / "gpus", machine(2, seed=str(tmp_path)))
    variables = flight_environ({}, str(tmp_path), "2.13") | {"LIMIT_S": "600"}
    waits, absent = start_ranks(
        played_python,
        "missing_peer",
        ["waits"],
        count=2,
        gpus=tmp_path / "gpus",
        variables=variables,
    )
    with waits.process, absent.process:
        assert waits.process.stdout is not None
        assert waits.process.stdout.readline() == "pending True\n"
        recorders = [
            Recorder(rank, Path(f"/proc/{played.process.pid}"))
            for rank, played in enumerate((waits, absent))
        ]
        assert all(recorder.ask() for recorder in recorders)
        eventually(lambda: all(r.poll() for r in recorders), "both dumps")
        waits.process.kill()
        absent.process.kill()

    entered = [
        [reached.entered for reached in r.flight.reached.values()] for r in recorders if r.flight
    ]
    assert entered == [[2], [1]]
