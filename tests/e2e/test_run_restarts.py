# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run --max-restarts`: what comes before workers are started again, without Slurm."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.supervised import eventually
from tests.support.unshared import DEADLINE_S, Machine, free_port

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

TRAIN = Path(__file__).parents[1] / "support" / "training.py"
OPTIONS = ("--nproc_per_node=1", "--max-restarts=2")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Two machines that train for real, and whose probes are played; they end with the test."""
    found = [Machine(tmp_path, rank, trains=True) for rank in range(2)]
    yield found
    for each in found:
        if each.process is not None and each.process.poll() is None:
            lose(each)


@pytest.fixture
def master() -> str:
    return f"127.0.0.1:{free_port()}"


def given(home: Path, *fails: str) -> tuple[str, ...]:
    return (*fails, f"--checkpoint={home}/ck.pt", "--steps=6", "--step-s=0.2")


def train(machine: Machine, words: Sequence[str], master: str, fails: Sequence[str] = ()) -> None:
    arguments = given(machine.home.parent, *fails)
    machine.run(*OPTIONS, *words, program=str(TRAIN), given=arguments, MASTER_ADDR=master)


def codes(machines: list[Machine]) -> list[int]:
    """Return how they end; their workers' tracebacks are their own affair."""
    found = []
    for each in machines:
        assert each.process is not None
        found.append(each.process.wait(DEADLINE_S))
        assert "slurm_health/" not in each.said, each.said  # a traceback of ours
    return found


def begun_at(*machines: Machine) -> list[tuple[int, int]]:
    """Return with how many processes training began, and at which step, each time.

    torchrun numbers the nodes as it likes, and the first rank says so.
    """
    said = "".join(machine.said for machine in machines)
    found = re.findall(r"(\d) processes begin at (\d+)", said)
    return [(int(count), int(step)) for count, step in found]


@pytest.mark.heavy
def test_the_nodes_are_checked_before_workers_are_started_again(
    machines: list[Machine], master: str
) -> None:
    for each in machines:
        train(each, ["--nnodes=2"], master, fails=("kill", "1", "--times=1"))
    assert codes(machines) == [0, 0], machines
    assert sorted(begun_at(*machines)) == [(2, 0), (2, 3)]
    assert "checking node[0-1] before the workers start (restart 1 of 2)" in machines[0].said
    assert machines[0].said.count("all healthy") == 2
    assert "UNCHECKED" not in machines[0].said + machines[1].said


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[list[Machine]]:
    """Three machines that train for real, and whose probes are played."""
    found = [Machine(tmp_path, rank, trains=True) for rank in range(3)]
    (tmp_path / "ck.hold").touch()
    yield found
    for each in found:
        if each.process is not None and each.process.poll() is None:
            lose(each)


def trains_from(machines: list[Machine], count: int, least_step: int = 0) -> None:
    """Wait until so many processes train, from a checkpoint of this step or a later one."""

    def found() -> bool:
        return any(n == count and step >= least_step for n, step in begun_at(*machines))

    eventually(found, f"{count} processes train: {machines}", within_s=DEADLINE_S)


def checkpointed(machine: Machine) -> None:
    path = machine.home.parent / "ck.pt"
    eventually(path.exists, "a checkpoint", within_s=DEADLINE_S)


def lose(machine: Machine) -> None:
    """Kill everything on a machine."""
    assert machine.process is not None
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"HOME={machine.home}\0" in path.read_text():
                os.kill(int(path.parent.name), signal.SIGKILL)
    machine.process.wait()


@pytest.mark.slow
def test_training_goes_on_without_a_lost_node_and_lets_it_in_again_once_it_is_well(
    elastic: list[Machine], master: str
) -> None:
    for each in elastic:
        train(each, ["--nnodes=2:3"], master)
    trains_from(elastic, 3)
    checkpointed(elastic[0])
    lose(elastic[2])
    trains_from(elastic, 2, 1)
    assert "1 of 3 nodes do not answer any more" in elastic[0].said
    assert "checking node[0-1] before the workers start (restart 1 of 2)" in elastic[0].said

    elastic[2].plays("raises")
    train(elastic[2], ["--nnodes=2:3"], master)
    elastic[2].says("NOT joined by a node in doubt (with node2 anyway: inconclusive, RuntimeError")
    assert codes(elastic[2:]) == [1]
    (elastic[2].played / "node2").unlink()

    train(elastic[2], ["--nnodes=2:3"], master)
    elastic[2].says("node2: the training has begun; checking this node alone before it joins")
    trains_from(elastic, 3, 1)
    (elastic[0].home.parent / "ck.hold").unlink()
    assert codes(elastic) == [0, 0, 0], elastic


@pytest.mark.slow
def test_if_node_0_is_lost_the_others_meet_again_on_the_next_one(
    elastic: list[Machine], master: str
) -> None:
    for each in elastic:
        train(each, ["--nnodes=2:3"], master)
    trains_from(elastic, 3)
    checkpointed(elastic[0])
    lose(elastic[0])
    elastic[1].says("checking node[1-2] before the workers start (restart 1 of 2)")
    trains_from(elastic[1:], 2, 1)
    (elastic[0].home.parent / "ck.hold").unlink()
    assert codes(elastic[1:]) == [0, 0], elastic
