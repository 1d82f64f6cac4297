# SPDX-License-Identifier: Apache-2.0
"""Real light workers: rounds as with torch, with numpy and sockets."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from slurm_health.preflight.agent.worker_process import end_together
from slurm_health.preflight.probes.light import LightGroup, listen
from tests.preflight.probes import wrong_numpy
from tests.preflight.probes.probe_bench import PAIR, VALUES, Bench, solo

ALONE = (VALUES, solo("matmul"), solo("memory_copy"), solo("memory_pattern"))


class LightBench(Bench):
    light = True


Make = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make workers, each of a node; `site` is what their interpreter runs at its start."""
    made: list[Bench] = []

    def begin(nodes: int = 1, *, site: str = "", **environ: str) -> Bench:
        if site:
            (tmp_path / "sitecustomize.py").write_text(site)
            monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        bench = LightBench(nodes, nodes=nodes, **environ)
        made.append(bench)
        bench.get_ready()
        return bench

    yield begin
    for bench in made:
        end_together(bench.workers)


def outcomes(done: list[dict[str, Any]]) -> list[str]:
    return [each["outcome"] for each in done]


def test_it_needs_no_torch_and_measures_what_a_node_does_alone(make: Make) -> None:
    bench = make(site=wrong_numpy.NO_TORCH)

    ready = bench.ready[0]
    assert (ready["torch"], ready["backend"], ready["device"]) == ("", "tcp", "cpu")
    assert ready["model"].endswith(f"with 1 thread, numpy {numpy.__version__}")
    assert outcomes(bench.round(*ALONE)) == ["measured"]
    assert bench.samples().keys() == {each["name"] for each in ALONE}


def test_two_nodes_exchange_data_with_each_other(make: Make) -> None:
    bench = make(2)

    done = bench.round(PAIR, pair="127.0.0.1")

    assert outcomes(done) == ["measured"] * 2
    sample = bench.samples(1)["allgather"]
    assert (sample["scope"], sample["world_size"]) == ("pair", 2)
    assert sample["figures"]["transport"] == "lo"


def test_arithmetic_that_is_wrong_is_the_nodes_fault(make: Make) -> None:
    bench = make(site=wrong_numpy.LYING)

    (done,) = bench.round(VALUES)

    assert (done["outcome"], done["own_fault"]) == ("failed", True)
    assert done["wrong_results"]
    assert not done["spent"]
    assert done["detail"].startswith("the processors compute wrong results: ")


def test_data_that_arrives_changed_is_a_failure_and_names_the_sender(make: Make) -> None:
    bench = make(2, site=wrong_numpy.CHANGED_ON_THE_WAY)

    done = bench.round(PAIR, pair="127.0.0.1")

    assert outcomes(done) == ["failed", "failed"]
    assert not any(each["own_fault"] for each in done)
    assert "rank 0 of 2 received other data than rank 1 sent" in done[0]["detail"]


def test_a_worker_whose_partner_is_gone_stops_when_told_to_and_goes_on_after_it(
    make: Make,
) -> None:
    bench = make(2)
    bench.begin(PAIR, pair="127.0.0.1")
    bench.workers[1].kill()
    bench.hears(0, "scope")
    bench.workers[0].send({"op": "abort", "round": 7})

    done = bench.hears(0, "done")
    assert (done["outcome"], done["own_fault"]) in {("failed", False), ("timed_out", False)}
    assert bench.workers[0].gone() is None


def test_a_probe_that_needs_torch_is_left_out_and_one_that_does_not_is_run(
    make: Make, tmp_path: Path
) -> None:
    needs = tmp_path / "needs.py"
    needs.write_text("import torch\n\ndef measure(context):\n    return []\n")
    own = tmp_path / "own.py"
    own.write_text(
        "from slurm_health.preflight.probes.context import Sample\n"
        "def measure(context):\n    return [Sample(iteration_ms=[1.0])]\n"
    )
    bench = make(site=wrong_numpy.NO_TORCH)

    done = bench.round(solo("needs", str(needs)), solo("gpt_fit"), solo("own", str(own)))

    assert outcomes(done) == ["measured"]
    assert bench.samples().keys() == {"own"}


def test_it_listens_on_the_address_that_the_orders_name_and_on_no_other() -> None:
    with listen("127.0.0.2") as server:
        assert server.getsockname()[0] == "127.0.0.2"

    with pytest.raises(SystemExit, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1")


# What a stranger says to the first member, before the other one comes.
STRANGERS = {
    "nothing": b"",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "a line without an end": b"x" * 100_000,
    "another meeting": b"7/other",
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS)
def test_strangers_at_its_port_hold_up_no_group(words: bytes) -> None:
    numbers: dict[int, list[int]] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(listen("127.0.0.1"))
        port = server.getsockname()[1]
        for _ in range(70):  # more than it keeps
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.setblocking(False)
            stranger.send(words.ljust(512) if words else words)

        def join(rank: int) -> None:
            group = LightGroup(server, lambda: None)
            place = {"rank": rank, "address": "127.0.0.1", "port": port, "prefix": "7/pair"}
            try:
                group.join(place, "pair")
                numbers[rank] = group.numbers(rank + 7)
            finally:
                group.leave()

        members = [threading.Thread(target=join, args=[rank]) for rank in range(2)]
        for member in members:
            member.start()
        for member in members:
            member.join()

    assert numbers == {rank: [7, 8] for rank in range(2)}


def test_a_member_that_comes_before_the_first_one_has_left_another_round_is_let_in_later() -> None:
    with listen("127.0.0.1") as server:
        place = {"address": "127.0.0.1", "port": server.getsockname()[1]}
        stop = threading.Event()

        def check() -> None:
            if stop.is_set():
                raise InterruptedError

        first, second = LightGroup(server, check), LightGroup(server, lambda: None)

        def in_old_round() -> None:
            with pytest.raises(InterruptedError):
                first.join({**place, "rank": 0, "prefix": "s/6"}, "pair")

        old = threading.Thread(target=in_old_round)
        old.start()
        new = threading.Thread(
            target=second.join, args=[{**place, "rank": 1, "prefix": "s/7"}, "pair"]
        )
        new.start()
        stop.set()
        old.join()
        again = LightGroup(server, lambda: None)
        again.join({**place, "rank": 0, "prefix": "s/7"}, "pair")
        new.join()
        again.leave()
        second.leave()
