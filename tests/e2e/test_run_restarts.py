# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run` on one machine as on several: restarts, and machines that share nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.supervised import eventually
from tests.support.unshared import DEADLINE_S, Cable, Machine, free_port

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


# --- machines that share nothing: real processes and sockets, no directory ------------------------


EXAMPLE = str(Path(__file__).parents[2] / "examples" / "train_torchrun.py")
SECRET = "correct horse battery staple"


@pytest.fixture
def strangers(tmp_path: Path) -> Iterator[list[Machine]]:
    """Three machines, whose processes end with the test."""
    found = [Machine(tmp_path, rank) for rank in range(3)]
    yield found
    for each in found:
        if each.process is not None and each.process.poll() is None:
            each.kill()


def codes_of(strangers: list[Machine]) -> list[int]:
    return [each.end() for each in strangers]


def trained(machine: Machine, option: str) -> str:
    """Return the last value of an option that torchrun was called with."""
    return str(re.findall(rf"--{option}=(\S+)", machine.said.partition("TRAINS")[2])[-1])


def all_gone(name: str) -> bool:
    """Tell whether no process has this on its command line any more."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if name in path.read_text():
                return False
    return True


def test_machines_that_share_nothing_are_checked_and_train(
    strangers: list[Machine], master: str
) -> None:
    for each in strangers:
        each.run("--nnodes=3", "--nproc_per_node=1", DLROVER_MASTER_ADDR=master)
    assert codes_of(strangers) == [0, 0, 0], strangers
    assert "node[0-2]" in strangers[0].said
    assert "all healthy" in strangers[0].said
    host, _, port = master.rpartition(":")
    for each in strangers:
        assert trained(each, "nnodes") == "3"
        assert trained(each, "rdzv-endpoint") == f"{host}:{port}"
        assert trained(each, "rdzv-conf") == f"is_host={int(each.rank == 0)}"
        assert each.left() == []
    assert [len(each.journals()) for each in strangers] == [1, 0, 0]


def test_a_faulty_node_is_left_out_and_the_others_train(
    strangers: list[Machine], master: str
) -> None:
    strangers[1].plays("raises")
    for each in strangers:
        each.run("--nnodes=2:3", MASTER_ADDR=master)
    assert codes_of(strangers) == [0, 0, 0], strangers
    assert "node1 is LEFT OUT: faulty" in strangers[1].said
    assert "TRAINS" not in strangers[1].said
    assert [trained(strangers[each], "nnodes") for each in (0, 2)] == ["2:3", "2:3"]


def test_nodes_that_know_the_secret_take_part(
    strangers: list[Machine], master: str, tmp_path: Path
) -> None:
    for each in strangers:
        each.run("--nnodes=3", MASTER_ADDR=master, SLURM_HEALTH_SECRET=SECRET)
    assert codes_of(strangers) == [0, 0, 0], strangers
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not any(SECRET.encode() in path.read_bytes() for path in written)


@pytest.mark.heavy
def test_the_others_end_soon_when_node_0_is_killed(strangers: list[Machine], master: str) -> None:
    strangers[2].plays("stuck")
    for each in strangers:
        each.run("--nnodes=3", MASTER_ADDR=master)
    strangers[0].says("round 0")
    strangers[0].kill()
    assert codes_of(strangers[1:]) == [4, 4], strangers
    for each in strangers[1:]:
        assert "node0 has ended" in each.said
        assert each.left() == []
    eventually(lambda: all_gone(str(strangers[1].python.parent.parent)), "all processes are gone")


@pytest.mark.heavy
def test_a_connection_that_was_cut_is_made_again(strangers: list[Machine], master: str) -> None:
    cable = Cable(int(master.rpartition(":")[2]) + 1)
    near = f"127.0.0.1:{cable.port - 1}"
    strangers[2].plays("never-ready")
    for each in strangers:
        each.run("--nnodes=3", MASTER_ADDR=near if each.rank == 1 else master)
    strangers[1].says("taking part")
    cable.cut()
    strangers[1].says("connection to node0")
    cable.mend()
    strangers[1].says("again\n")
    strangers[2].plays("well")
    assert codes_of(strangers) == [0, 0, 0], strangers
    assert "all healthy" in strangers[0].said
    cable.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_of_one_node_ends_all(
    strangers: list[Machine], master: str, rank: int
) -> None:
    strangers[2].plays("never-ready")
    for each in strangers:
        each.run("--nnodes=3", MASTER_ADDR=master)
    strangers[0].says("all nodes are there")
    strangers[rank].interrupt()
    ends = codes_of(strangers)
    assert ends[rank] == 130, strangers
    assert ends[0] == 130, strangers
    assert ends[2] == 4, strangers
    assert "was ended by" in strangers[2].said
    eventually(lambda: all_gone(str(strangers[1].python.parent.parent)), "all processes are gone")
    assert [each.left() for each in strangers] == [[], [], []]


def test_nodes_meet_over_ipv6(strangers: list[Machine]) -> None:
    for each in strangers:
        each.run("--nnodes=3", MASTER_ADDR="::1", MASTER_PORT=str(PORT_V6))
    assert codes_of(strangers) == [0, 0, 0], strangers
    assert trained(strangers[1], "rdzv-endpoint") == f"[::1]:{PORT_V6}"


PORT_V6 = free_port()


@pytest.mark.heavy
def test_machines_that_share_nothing_train_for_real(tmp_path: Path, master: str) -> None:
    strangers = [Machine(tmp_path, rank, real=True) for rank in range(2)]
    for each in strangers:
        each.run("--nnodes=2", "--nproc_per_node=1", program=EXAMPLE, DLROVER_MASTER_ADDR=master)
    assert codes_of(strangers) == [0, 0], strangers
    assert "2 processes" in "".join(each.said for each in strangers)
