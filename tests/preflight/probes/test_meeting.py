# SPDX-License-Identifier: Apache-2.0
"""Partners that do not answer are no fault of this node; who meets whom, and over what way."""

import contextlib
import itertools
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.preflight.agent.worker_process import Done, end_together
from slurm_health.preflight.probes import torch_group
from slurm_health.preflight.probes.meeting import ATTEMPT_S, ATTEMPTS, circles
from tests.preflight.probes import wrong_torch
from tests.preflight.probes.probe_bench import PAIR, Bench, solo
from tests.support.supervised import eventually


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """Return a port on which nothing is answered, as behind a link that drops every packet."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        place = server.getsockname()
        for _ in range(4):  # what is queued beyond the backlog gets no answer
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(place)
        yield place[1]


@pytest.mark.heavy
def test_a_meeting_place_that_does_not_answer_ends_the_round_before_any_deadline(
    make: type[Bench],
) -> None:
    bench = make()
    with silent_port() as port:
        well, bench.ready = bench.ready, [{"store_port": port}]
        (done,) = bench.round(solo("matmul"), PAIR, pair="127.0.0.1")

    assert (done["outcome"], done["own_fault"], done["spent"]) == ("failed", False, False)
    assert done["detail"] == f"allgather: no answer from 127.0.0.1 port {port} to 10 attempts"
    bench.ready = well
    assert bench.round(solo("matmul"))[0]["outcome"] == "measured"


def test_a_worker_that_waits_for_an_answer_hears_an_abort(make: type[Bench]) -> None:
    bench = make()
    with silent_port() as port:
        bench.ready = [{"store_port": port}]
        bench.begin(PAIR, pair="127.0.0.1")
        bench.workers[0].send({"op": "abort", "round": 7})

        assert bench.hears(0, "done")["outcome"] == "timed_out"


@pytest.mark.heavy
def test_a_meeting_place_that_refuses_is_waited_for_until_an_abort(make: type[Bench]) -> None:
    bench = make()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    bench.ready = [{"store_port": port}]
    bench.begin(PAIR, pair="127.0.0.1")
    bench.hears(0, "scope")
    begun_s = time.monotonic()
    eventually(lambda: time.monotonic() > begun_s + 1.2 * ATTEMPTS * ATTEMPT_S, "some patience")
    assert not [e for e in bench.workers[0].read_lines() if isinstance(e, Done)]
    bench.workers[0].send({"op": "abort", "round": 7})

    assert bench.hears(0, "done")["outcome"] == "timed_out"


class AbsentMinded(Bench):
    """Two workers of one node, as partners; the second comes to a round and does no more."""

    def __init__(self, directory: Path) -> None:
        (directory / "sitecustomize.py").write_text(wrong_torch.ABSENT_MINDED)
        present = directory / "present"
        super().__init__(2, PYTHONPATH=str(directory), ABSENT_MINDED=str(present))
        self.get_ready()
        self.begin(solo("matmul"), PAIR, pair="127.0.0.1")
        eventually(present.exists, "a group with both in it")


@pytest.fixture
def absent_minded(tmp_path: Path) -> Iterator[AbsentMinded]:
    bench = AbsentMinded(tmp_path)
    yield bench
    end_together(bench.workers)


@pytest.mark.heavy
def test_a_partner_that_dies_is_no_fault_of_this_node_which_says_so_before_it_leaves_the_group(
    absent_minded: AbsentMinded,
) -> None:
    absent_minded.workers[1].kill()

    done = absent_minded.hears(0, "done")

    assert (done["outcome"], done["own_fault"]) == ("failed", False)
    scopes = [each["scope"] for each in absent_minded.events[0] if each["event"] == "scope"]
    assert scopes == ["solo", "pair"]


@pytest.mark.heavy
def test_a_partner_that_exchanges_nothing_is_waited_for_until_an_abort(
    absent_minded: AbsentMinded,
) -> None:
    absent_minded.workers[0].send({"op": "abort", "round": 7})

    assert absent_minded.hears(0, "done")["outcome"] == "timed_out"


@pytest.mark.parametrize("size", range(1, 10))
def test_each_device_is_alone_first_and_then_once_with_every_other(size: int) -> None:
    of_all = [circles(rank, size) for rank in range(size)]

    assert [each[0] for each in of_all] == [[rank] for rank in range(size)]
    met = {tuple(circle) for each in of_all for circle in each[1:] if circle}
    assert met == set(itertools.combinations(range(size), 2))
    assert all(len([one for one in each[1:] if one]) == size - 1 for each in of_all)


LOG = """\
n1:71:93 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>
n1:71:93 [0] NCCL INFO Using network IB
n1:71:93 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
n1:71:93 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""


def said(log: str) -> str:
    """Return what is read from a log that a library wrote where it was told to."""
    environ: dict[str, str] = {}
    torch_group.record_ways(environ)
    with Path(environ["NCCL_DEBUG_FILE"]).open("w") as file:
        file.write(log)
    return torch_group.ways_used(environ, on_cuda=True)


def test_the_way_is_the_one_that_nccl_connected_by() -> None:
    assert said(LOG) == "NET/IB with GPUDirect RDMA"
    assert said(LOG.replace("/GDRDMA", "").replace("/IB/", "/Socket/")) == "NET/Socket"
    assert said(LOG.replace("IB/0/", "IB/3(2)/")) == "NET/IB with GPUDirect RDMA"
    assert (
        said(LOG.replace("IB/0/", "AWS Libfabric/3(2)/")) == "NET/AWS Libfabric with GPUDirect RDMA"
    )
    assert said("") == ""


def test_a_log_that_the_user_wants_is_left_to_him() -> None:
    environ = {"NCCL_DEBUG": "WARN"}
    torch_group.record_ways(environ)

    assert environ == {"NCCL_DEBUG": "WARN"}
    assert torch_group.ways_used(environ, on_cuda=True) == ""


def test_over_gloo_it_is_the_interface() -> None:
    assert torch_group.ways_used({"GLOO_SOCKET_IFNAME": "ib0"}, on_cuda=False) == "ib0"
