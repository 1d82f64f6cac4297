# SPDX-License-Identifier: Apache-2.0
"""What `run` has beside the workers of its training: a monitor where nothing else watches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from slurm_health.records.script_records import ScriptStarted
from slurm_health.system import journal
from slurm_health.torchrun import watching
from slurm_health.torchrun.arguments import Arguments
from slurm_health.torchrun.place import TaskPlace
from slurm_health.torchrun.step import Start

IN_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}


def told(root: Path, monitor: str = "") -> Arguments:
    own = {"journal": str(root)} | ({"monitor": monitor} if monitor else {})
    return Arguments(options=[], program=["train.py"], given={}, own={**own})


def place(node: str = "n1") -> TaskPlace:
    return TaskPlace(nodes=("n1", "n2"), node=node, start="s", job_id=7, cluster="c")


def monitor(
    root: Path, node: str = "n1", mode: str = "", environ: Mapping[str, str] = IN_SLURM
) -> str:
    here = place(node)
    return " ".join(watching.monitor(here, Start(nodes=here.nodes), told(root, mode), environ))


def test_the_first_node_that_trains_has_a_monitor_that_does_as_it_is_told(tmp_path: Path) -> None:
    assert "monitor.watch" in monitor(tmp_path)
    assert "--on-hang=report" in monitor(tmp_path)
    assert "--on-hang=restart" in monitor(tmp_path, mode="restart")


def test_in_a_step_of_a_job_that_step_alone_is_watched(tmp_path: Path) -> None:
    assert "--step=3" in monitor(tmp_path, environ={**IN_SLURM, "SLURM_STEP_ID": "3"})
    assert "--step" not in monitor(tmp_path)


def test_another_node_has_none(tmp_path: Path) -> None:
    assert monitor(tmp_path, "n2") == ""


def test_in_slurm_nothing_but_srun_starts_the_agents_of_nodes() -> None:
    assert watching.marked(IN_SLURM) == {}
    assert watching.node_agent(place(), IN_SLURM) == ()


def test_outside_slurm_each_node_has_its_own_and_knows_its_processes_by_a_mark(
    tmp_path: Path,
) -> None:
    marked = watching.marked({})
    (mark,) = marked.values()

    assert f"--training={mark}" in monitor(tmp_path, environ=marked)
    assert {f"--job={mark}", "--node=n2"} < set(watching.node_agent(place("n2"), marked))
    assert watching.marked({}) != marked


def test_in_slurm_a_node_that_trains_alone_is_known_by_a_mark_of_its_own() -> None:
    marked = watching.marked(IN_SLURM, alone=True)

    assert watching.node_agent(place(), IN_SLURM | marked) != ()


def test_nothing_is_watched_where_that_is_switched_off(tmp_path: Path) -> None:
    assert watching.is_on(place(), told(tmp_path), IN_SLURM)
    assert not watching.is_on(place(), told(tmp_path, "off"), IN_SLURM)


@pytest.mark.parametrize(("attempt", "watched"), [(0, True), (1, False)])
def test_a_script_that_sbatch_has_watched_in_this_attempt_is_not_watched_twice(
    tmp_path: Path, attempt: int, watched: bool
) -> None:
    run = tmp_path / "c" / "7" / str(attempt)
    run.mkdir(parents=True, mode=0o700)
    journal.create(run, [journal.SUPERVISOR])
    started = ScriptStarted(script="train.sh", pid=1)
    journal.Writer(run, journal.SUPERVISOR, time.time).append(started)

    assert watching.is_on(place(), told(tmp_path), IN_SLURM) != watched
