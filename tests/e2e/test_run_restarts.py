# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run` on one machine as on several: ends, restarts, machines that share nothing."""

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.supervised import eventually
from tests.support.unshared import DEADLINE_S, Machine, free_port

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

TRAIN = str(Path(__file__).parents[1] / "support" / "training.py")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "train_torchrun.py")
# A signal that arrives before torchrun has noted whom it started leaves that running.
WAITS = """\
import pathlib, time
time.sleep(2)
pathlib.Path('began').touch()
time.sleep(600)
"""
Make = Callable[..., list[Machine]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make machines, whose processes end with the test."""
    made: list[Machine] = []

    def machines(count: int, **how: bool) -> list[Machine]:
        made.extend(Machine(tmp_path, rank, **how) for rank in range(count))
        return made

    yield machines
    for each in made:
        each.lose()


@pytest.fixture
def master() -> str:
    return f"127.0.0.1:{free_port()}"


def codes(machines: list[Machine]) -> list[int]:
    """Return how they end; their workers' tracebacks are their own affair."""
    found = [each.wait() for each in machines]
    assert not [each for each in machines if re.search('File ".*slurm_health/', each.said)]
    return found


def all_gone(machines: list[Machine]) -> None:
    """Wait until no process has their interpreters on its command line any more."""

    def gone() -> bool:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(machines[1].python.parent.parent) in path.read_text():
                    return False
        return True

    eventually(gone, "all processes are gone")


# --- one that is not checked ----------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("number", "monitor"),
    [(signal.SIGTERM, "report"), (signal.SIGTERM, "off"), (signal.SIGINT, "report")],
)
def test_the_process_ends_as_its_torchrun_does_and_shows_none_of_our_code(
    make: Make, number: signal.Signals, monitor: str
) -> None:
    (machine,) = make(1, trains=True)
    (machine.home / "train.py").write_text(WAITS)
    machine.run(f"--monitor={monitor}", "--standalone", check=False)
    eventually((machine.home / "began").exists, "the script began")
    machine.signal(number)
    assert machine.wait() == 128 + number, machine
    if number == signal.SIGTERM:
        assert "closing signal SIGTERM" in machine.said
    own = ("quiet_torchrun.py", "SignalException", *["Traceback"] * (number == signal.SIGTERM))
    assert not [text for text in own if text in machine.said]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "alone",
    [["--standalone"], *(pytest.param(w, marks=pytest.mark.slow) for w in (["--nnodes=1"], []))],
)
def test_one_machine_that_is_not_checked_says_why_its_training_failed(
    make: Make, alone: list[str]
) -> None:
    (machine,) = make(1, trains=True)
    (machine.home / "train.py").write_text("raise KeyError('lr')\n")
    machine.run(*alone, check=False)
    assert machine.wait() == 1
    assert machine.said.count("post-mortem: why") == 1, machine
    assert "KeyError: 'lr'" in machine.said


def test_nodes_that_know_no_ranks_say_that_nothing_watches_them(make: Make, master: str) -> None:
    machines = make(2)
    words = ("--nnodes=2", "--monitor=stop", "--rdzv-backend=c10d", f"--rdzv-endpoint={master}")
    for each in machines:
        each.run(*words, check=False)
    assert codes(machines) == [0, 0], machines
    assert all("this training is not watched: " in each.said for each in machines)


# --- trainings that go on -------------------------------------------------------------------------


def train(machine: Machine, nodes: str, master: str, *fails: str) -> None:
    options = ("--nproc_per_node=1", "--max-restarts=2", f"--nnodes={nodes}")
    given = (*fails, f"--checkpoint={machine.home.parent}/ck.pt", "--steps=6", "--step-s=0.2")
    machine.run(*options, program=TRAIN, given=given, MASTER_ADDR=master)


def begun_at(*machines: Machine) -> list[tuple[int, int]]:
    """Return with how many processes training began, and at which step, each time.

    torchrun numbers the nodes as it likes, and the first rank says so.
    """
    said = "".join(machine.said for machine in machines)
    found = re.findall(r"(\d) processes begin at (\d+)", said)
    return [(int(count), int(step)) for count, step in found]


@pytest.mark.heavy
def test_the_nodes_are_checked_before_workers_are_started_again(make: Make, master: str) -> None:
    machines = make(2, trains=True)
    for each in machines:
        train(each, "2", master, "kill", "1", "--times=1")
    assert codes(machines) == [0, 0], machines
    assert sorted(begun_at(*machines)) == [(2, 0), (2, 3)]
    assert "checking node[0-1] before the workers start (restart 1 of 2)" in machines[0].said
    assert machines[0].said.count("all healthy") == 2
    assert "UNCHECKED" not in machines[0].said + machines[1].said


@pytest.fixture
def elastic(make: Make, master: str) -> list[Machine]:
    """Three machines that train, and have a checkpoint."""
    machines = make(3, trains=True)
    root = machines[0].home.parent
    (root / "ck.hold").touch()
    for each in machines:
        train(each, "2:3", master)
    trains_from(machines, 3)
    eventually((root / "ck.pt").exists, "a checkpoint", within_s=DEADLINE_S)
    return machines


def trains_from(machines: list[Machine], count: int, least_step: int = 0) -> None:
    """Wait until so many processes train, from a checkpoint of this step or a later one."""

    def found() -> bool:
        return any(n == count and step >= least_step for n, step in begun_at(*machines))

    eventually(found, f"{count} processes train: {machines}", within_s=DEADLINE_S)


@pytest.mark.slow
def test_training_goes_on_without_a_lost_node_and_lets_it_in_again_once_it_is_well(
    elastic: list[Machine], master: str
) -> None:
    elastic[2].lose()
    trains_from(elastic, 2, 1)
    assert "1 of 3 nodes do not answer any more" in elastic[0].said
    assert "checking node[0-1] before the workers start (restart 1 of 2)" in elastic[0].said

    elastic[2].plays("raises")
    train(elastic[2], "2:3", master)
    elastic[2].says("NOT joined by a node in doubt (with node2 anyway: inconclusive, RuntimeError")
    assert codes(elastic[2:]) == [1]
    (elastic[2].played / "node2").unlink()

    train(elastic[2], "2:3", master)
    elastic[2].says("node2: the training has begun; checking this node alone before it joins")
    trains_from(elastic, 3, 1)
    (elastic[0].home.parent / "ck.hold").unlink()
    assert codes(elastic) == [0, 0, 0], elastic


@pytest.mark.slow
def test_if_node_0_is_lost_the_others_meet_again_on_the_next_one(elastic: list[Machine]) -> None:
    elastic[0].lose()
    elastic[1].says("checking node[1-2] before the workers start (restart 1 of 2)")
    trains_from(elastic[1:], 2, 1)
    (elastic[0].home.parent / "ck.hold").unlink()
    assert codes(elastic[1:]) == [0, 0], elastic


# --- machines that share nothing: real processes and sockets, no directory ------------------------


def trained(machine: Machine, option: str) -> str:
    """Return the last value of an option that torchrun was called with."""
    return str(re.findall(rf"--{option}=(\S+)", machine.said.partition("TRAINS")[2])[-1])


def test_machines_that_share_nothing_are_checked_and_train(make: Make, master: str) -> None:
    strangers = make(3)
    for each in strangers:
        each.run("--nnodes=3", "--nproc_per_node=1", DLROVER_MASTER_ADDR=master)
    assert codes(strangers) == [0, 0, 0], strangers
    assert "node[0-2]" in strangers[0].said
    assert "all healthy" in strangers[0].said
    for each in strangers:
        assert trained(each, "nnodes") == "3"
        assert trained(each, "rdzv-endpoint") == master
        assert trained(each, "rdzv-conf") == f"is_host={int(each.rank == 0)}"
        assert each.left() == []
    assert [len(each.journals()) for each in strangers] == [1, 0, 0]


def test_a_faulty_node_is_left_out_and_the_others_train(make: Make, master: str) -> None:
    strangers = make(3)
    strangers[1].plays("raises")
    for each in strangers:
        each.run("--nnodes=2:3", MASTER_ADDR=master)
    assert codes(strangers) == [0, 0, 0], strangers
    assert "node1 is LEFT OUT: faulty" in strangers[1].said
    assert "TRAINS" not in strangers[1].said
    assert [trained(strangers[each], "nnodes") for each in (0, 2)] == ["2:3", "2:3"]


@pytest.mark.heavy
def test_the_others_end_soon_when_node_0_is_killed(make: Make, master: str) -> None:
    strangers = make(3)
    strangers[2].plays("stuck")
    for each in strangers:
        each.run("--nnodes=3", MASTER_ADDR=master)
    strangers[0].says("round 0")
    strangers[0].signal(signal.SIGKILL)
    strangers[0].wait()
    assert codes(strangers[1:]) == [4, 4], strangers
    for each in strangers[1:]:
        assert "node0 has ended" in each.said
        assert each.left() == []
    all_gone(strangers)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_of_one_node_ends_all(make: Make, master: str, rank: int) -> None:
    strangers = make(3)
    strangers[2].plays("never-ready")
    for each in strangers:
        each.run("--nnodes=3", MASTER_ADDR=master)
    strangers[0].says("all nodes are there")
    strangers[rank].signal(signal.SIGINT)
    ends = codes(strangers)
    assert (ends[rank], ends[0], ends[2]) == (130, 130, 4), strangers
    assert "was ended by" in strangers[2].said
    all_gone(strangers)
    assert [each.left() for each in strangers] == [[], [], []]


def test_nodes_meet_over_ipv6(make: Make) -> None:
    strangers, port = make(3), free_port()
    for each in strangers:
        each.run("--nnodes=3", MASTER_ADDR="::1", MASTER_PORT=str(port))
    assert codes(strangers) == [0, 0, 0], strangers
    assert trained(strangers[1], "rdzv-endpoint") == f"[::1]:{port}"


@pytest.mark.heavy
def test_machines_that_share_nothing_train_for_real(make: Make, master: str) -> None:
    strangers = make(2, real=True)
    for each in strangers:
        each.run("--nnodes=2", "--nproc_per_node=1", program=EXAMPLE, DLROVER_MASTER_ADDR=master)
    assert codes(strangers) == [0, 0], strangers
    assert "2 processes" in "".join(each.said for each in strangers)
