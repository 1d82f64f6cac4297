# SPDX-License-Identifier: Apache-2.0
"""What `run` has beside the workers of its training: a monitor where nothing else watches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from slurm_health.records.script_records import ScriptStarted
from slurm_health.system import journal
from slurm_health.torchrun.arguments import Arguments
from slurm_health.torchrun.place import TaskPlace
from slurm_health.torchrun.step import Start
from slurm_health.torchrun.train import is_to_watch, monitor_commands
from slurm_health.training.monitor.agent import TRAINING

IN_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}


def told(root: Path, monitor: str = "") -> Arguments:
    own = {"journal": str(root)} | ({"monitor": monitor} if monitor else {})
    return Arguments(options=[], program=["train.py"], given={}, own={**own})


def place(node: str = "n1") -> TaskPlace:
    return TaskPlace(nodes=("n1", "n2"), node=node, start="s", job_id=7, cluster="c")


def commands(
    root: Path, node: str = "n1", mode: str = "", environ: Mapping[str, str] = IN_SLURM
) -> dict[str, str]:
    here = place(node)
    start = Start(nodes=here.nodes)
    found = monitor_commands(here, start, told(root, mode), environ)
    return {name: " ".join(map(str, words)) for name, words in found.items()}  # type: ignore[call-overload]


def test_the_first_node_that_trains_has_a_monitor_that_does_as_it_is_told(tmp_path: Path) -> None:
    assert "--on-hang=report" in commands(tmp_path)["monitor"]
    assert "--on-hang=restart" in commands(tmp_path, mode="restart")["monitor"]
    assert "--step" not in commands(tmp_path)["monitor"]
    assert "--step=3" in commands(tmp_path, environ={**IN_SLURM, "SLURM_STEP_ID": "3"})["monitor"]
    assert commands(tmp_path, "n2") == {}


def test_where_no_srun_starts_agents_each_node_has_its_own_that_knows_its_processes_by_a_mark(
    tmp_path: Path,
) -> None:
    marked = {TRAINING: "abc"}
    assert "--training=abc" in commands(tmp_path, environ=marked)["monitor"]
    assert commands(tmp_path, "n2", environ=marked).keys() == {"node_agent"}
    assert "--job=abc" in commands(tmp_path, "n2", environ=marked)["node_agent"]
    assert "--node=n2" in commands(tmp_path, "n2", environ=marked)["node_agent"]


@pytest.mark.parametrize(
    ("mode", "attempt", "watched"),
    [("", None, True), ("off", None, False), ("", 0, False), ("", 1, True)],
)
def test_a_training_is_watched_once_and_not_where_that_is_switched_off(
    tmp_path: Path, mode: str, attempt: int | None, watched: bool
) -> None:
    if attempt is not None:  # its batch script is watched in this attempt
        run = tmp_path / "c" / "7" / str(attempt)
        run.mkdir(parents=True, mode=0o700)
        journal.create(run, [journal.SUPERVISOR])
        started = ScriptStarted(script="train.sh", pid=1)
        journal.Writer(run, journal.SUPERVISOR, time.time).append(started)

    assert is_to_watch(place(), told(tmp_path, mode), IN_SLURM) == watched
