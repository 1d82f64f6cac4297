# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run` on machines that share nothing: real processes and sockets, no directory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.supervised import eventually
from tests.support.unshared import Cable, Machine, free_port

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

TRAIN = str(Path(__file__).parents[2] / "examples" / "train_torchrun.py")
SECRET = "correct horse battery staple"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Three machines, whose processes end with the test."""
    found = [Machine(tmp_path, rank) for rank in range(3)]
    yield found
    for each in found:
        if each.process is not None and each.process.poll() is None:
            each.kill()


@pytest.fixture
def master() -> str:
    return f"127.0.0.1:{free_port()}"


def codes(machines: list[Machine]) -> list[int]:
    return [each.end() for each in machines]


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
    machines: list[Machine], master: str
) -> None:
    for each in machines:
        each.run("--nnodes=3", "--nproc_per_node=1", DLROVER_MASTER_ADDR=master)
    assert codes(machines) == [0, 0, 0], machines
    assert "node[0-2]" in machines[0].said
    assert "all healthy" in machines[0].said
    host, _, port = master.rpartition(":")
    for each in machines:
        assert trained(each, "nnodes") == "3"
        assert trained(each, "rdzv-endpoint") == f"{host}:{port}"
        assert trained(each, "rdzv-conf") == f"is_host={int(each.rank == 0)}"
        assert each.left() == []
    assert [len(each.journals()) for each in machines] == [1, 0, 0]


def test_a_faulty_node_is_left_out_and_the_others_train(
    machines: list[Machine], master: str
) -> None:
    machines[1].plays("raises")
    for each in machines:
        each.run("--nnodes=2:3", MASTER_ADDR=master)
    assert codes(machines) == [0, 0, 0], machines
    assert "node1 is LEFT OUT: faulty" in machines[1].said
    assert "TRAINS" not in machines[1].said
    assert [trained(machines[each], "nnodes") for each in (0, 2)] == ["2:3", "2:3"]


def test_nodes_that_know_the_secret_take_part(
    machines: list[Machine], master: str, tmp_path: Path
) -> None:
    for each in machines:
        each.run("--nnodes=3", MASTER_ADDR=master, SLURM_HEALTH_SECRET=SECRET)
    assert codes(machines) == [0, 0, 0], machines
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not any(SECRET.encode() in path.read_bytes() for path in written)


@pytest.mark.heavy
def test_the_others_end_soon_when_node_0_is_killed(machines: list[Machine], master: str) -> None:
    machines[2].plays("stuck")
    for each in machines:
        each.run("--nnodes=3", MASTER_ADDR=master)
    machines[0].says("round 0")
    machines[0].kill()
    assert codes(machines[1:]) == [4, 4], machines
    for each in machines[1:]:
        assert "node0 has ended" in each.said
        assert each.left() == []
    eventually(lambda: all_gone(str(machines[1].python.parent.parent)), "all processes are gone")


@pytest.mark.heavy
def test_a_connection_that_was_cut_is_made_again(machines: list[Machine], master: str) -> None:
    cable = Cable(int(master.rpartition(":")[2]) + 1)
    near = f"127.0.0.1:{cable.port - 1}"
    machines[2].plays("never-ready")
    for each in machines:
        each.run("--nnodes=3", MASTER_ADDR=near if each.rank == 1 else master)
    machines[1].says("taking part")
    cable.cut()
    machines[1].says("connection to node0")
    cable.mend()
    machines[1].says("again\n")
    machines[2].plays("well")
    assert codes(machines) == [0, 0, 0], machines
    assert "all healthy" in machines[0].said
    cable.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_of_one_node_ends_all(machines: list[Machine], master: str, rank: int) -> None:
    machines[2].plays("never-ready")
    for each in machines:
        each.run("--nnodes=3", MASTER_ADDR=master)
    machines[0].says("all nodes are there")
    machines[rank].interrupt()
    ends = codes(machines)
    assert ends[rank] == 130, machines
    assert ends[0] == 130, machines
    assert ends[2] == 4, machines
    assert "was ended by" in machines[2].said
    eventually(lambda: all_gone(str(machines[1].python.parent.parent)), "all processes are gone")
    assert [each.left() for each in machines] == [[], [], []]


def test_nodes_meet_over_ipv6(machines: list[Machine]) -> None:
    for each in machines:
        each.run("--nnodes=3", MASTER_ADDR="::1", MASTER_PORT=str(PORT_V6))
    assert codes(machines) == [0, 0, 0], machines
    assert trained(machines[1], "rdzv-endpoint") == f"[::1]:{PORT_V6}"


PORT_V6 = free_port()


@pytest.mark.heavy
def test_machines_that_share_nothing_train_for_real(tmp_path: Path, master: str) -> None:
    machines = [Machine(tmp_path, rank, real=True) for rank in range(2)]
    for each in machines:
        each.run("--nnodes=2", "--nproc_per_node=1", program=TRAIN, DLROVER_MASTER_ADDR=master)
    assert codes(machines) == [0, 0], machines
    assert "2 processes" in "".join(each.said for each in machines)
