# SPDX-License-Identifier: Apache-2.0

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.framework import NothingCollected
from slurm_health.training.monitor.job_collectors import (
    JOB_TAIL_BYTES,
    JobOutput,
    PortHolders,
    SlurmWord,
    tail,
)
from tests.support.ended_jobs import job
from tests.support.fake_slurm import FakeSlurm
from tests.support.rows import rows

TRACEBACK = "Traceback (most recent call last):\n  File 'x'\nKeyError: 'lr'\n"


def test_the_end_of_a_file_of_gigabytes_is_read_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as file:
        file.truncate(5 << 30)  # sparse
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + TRACEBACK.encode())
    log = JobOutput(job(tmp_path, outputs=(path,))).collect_data()

    assert [each.error for each in log.failures] == ["KeyError: 'lr'"]
    assert len(tail(path, JOB_TAIL_BYTES)) == JOB_TAIL_BYTES


def test_output_that_is_not_text_is_read_as_far_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"\xff\xfe\0" * 100 + b"\n" + TRACEBACK.encode())

    assert JobOutput(job(tmp_path, outputs=(path,))).collect_data().failures


def test_a_fifo_in_place_of_a_file_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out")

    with pytest.raises(NothingCollected, match="no plain file"):
        JobOutput(job(tmp_path, outputs=(tmp_path / "out",))).collect_data()


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

    with pytest.raises(NothingCollected, match="no files"):
        JobOutput(ended).collect_data()

    os.chown(laid, 0, 0, follow_symlinks=False)
    assert JobOutput(ended).collect_data().failures


def test_the_files_that_srun_wrote_for_each_task_are_read(tmp_path: Path) -> None:
    logs = tmp_path / "logs [1]"
    logs.mkdir()
    for task in range(3):
        (logs / f"12-{task}.txt").write_text(TRACEBACK if task == 2 else "well\n")
    (logs / "11-0.txt").write_text(TRACEBACK.replace("lr", "of another job"))
    script = "#!/bin/bash\nsrun --output='logs [1]/%j-%t.txt' python train.py\n"
    log = JobOutput(job(tmp_path, script_text=script)).collect_data()

    assert [failure.error for failure in log.failures] == ["KeyError: 'lr'"]


def test_outside_a_job_slurm_is_not_asked(tmp_path: Path) -> None:
    with pytest.raises(NothingCollected, match="no Slurm job"):
        SlurmWord(job(tmp_path, environ={})).collect_data()


@rows
def test_slurm_is_not_asked_where_it_cannot_know_more_than_the_script(
    tmp_path: Path, end: dict[str, Any], asked: bool
) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.run_job(12, list(end["nodes"]))
    environ = {**slurm.environ(), "SLURM_JOB_ID": "12"}
    collector = SlurmWord(job(tmp_path, environ=environ, end=ScriptEnd(**end)))
    try:
        states = dict(collector.collect_data().node_states)
    except NothingCollected:
        states = {}

    assert bool(states) is asked


def test_the_process_that_listens_on_a_port_is_named() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        holders = PortHolders().collect_data().holders

    assert holders[port].startswith(f"process {os.getpid()} (")
