# SPDX-License-Identifier: Apache-2.0
"""Ranks without a heartbeat, found and seen on a real machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_health.training.monitor.ranks import SCRIPT, JobProcess, located, ranks_without_heartbeat
from slurm_health.training.monitor.voices import find_py_spy
from tests.training.monitor import test_ranks
from tests.training.monitor.test_ranks import JOB, eventually, found

start = test_ranks.start  # a fixture

SILENT = """
import os, sys, time
from pathlib import Path
if sys.argv[2] == "fork":
    os.fork()
(Path(sys.argv[1]) / "there").touch()
time.sleep(600)
"""


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a training without a heartbeat, as a shell runs it."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(how: str = "", wrapper: str = 'python "$@"; :', **environ: str) -> Any:
        here = tmp_path / f"silent-{len(started)}"
        here.mkdir()
        told = {"SLURM_JOB_ID": JOB, "SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "3", **environ}
        wrapper = wrapper.replace("python", sys.executable)
        started.append(
            subprocess.Popen(
                ["/bin/sh", "-c", wrapper, "sh", "-c", SILENT, str(here), how],
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


@pytest.mark.parametrize("how", ["", "fork"])
def test_a_rank_without_a_heartbeat_is_what_the_shell_of_its_task_runs(
    silent: Any, how: str
) -> None:
    shell = silent(how, SLURM_PROCID="2")
    (now,) = found().sample()

    assert (now.program, now.rank, now.steps, now.age_s) == ("3", 2, 0, 0.0)
    assert now.pid != shell.pid


def test_torchruns_workers_are_ranks_and_torchrun_itself_is_none(silent: Any) -> None:
    workers = 'export SLURM_PROCID=0; RANK=4 python "$@" & RANK=5 python "$@" & wait'
    silent(wrapper=workers, WORLD_SIZE="8")
    eventually(lambda: len(found().sample()) == 2)

    assert sorted((now.rank, now.world) for now in found().sample()) == [(4, 8), (5, 8)]


def test_a_torchrun_whose_workers_have_ended_is_no_rank_either(silent: Any, tmp_path: Path) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(SILENT)
    silent(wrapper=f'python {torchrun} "$3" "$4"; :', SLURM_PROCID="2")

    assert found().sample() == []


def test_what_outlives_a_rank_is_none_when_nobody_saw_the_rank(silent: Any) -> None:
    shell = silent("fork", SLURM_PROCID="2")
    (rank,) = found().sample()
    os.kill(shell.pid, signal.SIGKILL)
    os.kill(rank.pid, signal.SIGKILL)
    eventually(lambda: not any(now.pid == rank.pid for now in found().sample()))

    assert found().sample() == []


def test_the_one_training_of_a_script_is_its_rank(silent: Any) -> None:
    silent(SLURM_STEP_ID="", SLURM_PROCID="0")

    assert [(now.program, now.rank) for now in found().sample()] == [("script", 0)]


@pytest.mark.parametrize(
    ("words", "pids"),
    [(["python", "train.py"], [7]), (["python", "-m", "slurm_health"], []), ([""], [])],
)
def test_a_process_of_the_script_that_tells_no_command_line_is_ending_and_no_training(
    tmp_path: Path, words: list[str], pids: list[int]
) -> None:
    (tmp_path / "comm").write_text("python3\n")
    (tmp_path / "cmdline").write_text("\0".join(words))
    process = JobProcess(tmp_path, pid=7, parent=1, group=7, program=SCRIPT, rank=None, task=0)

    assert [rank.pid for rank in ranks_without_heartbeat({7: process}, {}, [])] == pids


def test_ranks_with_and_without_a_heartbeat_are_seen_beside_each_other(
    start: Any, silent: Any
) -> None:
    start(RANK="0")
    silent(RANK="1")

    assert sorted((now.rank, now.steps) for now in found().sample()) == [(0, 5), (1, 0)]


def test_a_rank_without_a_heartbeat_says_nothing_and_its_state_is_seen(silent: Any) -> None:
    silent(SLURM_PROCID="0")
    ranks = found()
    (now,) = ranks.sample()
    os.kill(now.pid, signal.SIGSTOP)
    eventually(lambda: ranks.sample()[0].state == "T")
    (sample,) = located(ranks.sample(), ranks.locate(again=False)[0])

    assert (sample.rank, sample.answered, sample.state) == (0, False, "T")


@pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")
def test_a_rank_without_a_heartbeat_is_seen_where_it_is_by_py_spy(silent: Any) -> None:
    silent(SLURM_PROCID="0")
    ranks = found()

    def stack() -> list[str]:
        (sample,) = located(ranks.sample(), ranks.locate(again=False)[0])
        return [frame.function for frame in sample.stack]

    eventually(lambda: stack() == ["<module>"])
