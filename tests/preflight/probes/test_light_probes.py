# SPDX-License-Identifier: Apache-2.0
"""Real light workers: rounds as with torch, with numpy and sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from slurm_health.preflight.agent.worker_process import end_together
from slurm_health.preflight.probes import host
from slurm_health.preflight.probes.light_ring import Ring
from tests.support import wrong_numpy
from tests.support.probe_bench import PAIR, VALUES, Bench, solo

RAIL = {"name": "rail_allgather", "scope": "rail", "path": ""}
NODE = {"name": "node_allgather", "scope": "node", "path": ""}
ALONE = (VALUES, solo("matmul"), solo("memory_copy"), solo("memory_pattern"))


class LightBench(Bench):
    light = True


Make = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make workers; `site` is what their interpreter runs at its start."""
    made: list[Bench] = []

    def begin(count: int = 1, *, nodes: int = 1, site: str = "", **environ: str) -> Bench:
        if site:
            (tmp_path / "sitecustomize.py").write_text(site)
            monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        bench = LightBench(count, nodes=nodes, **environ)
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


def test_ranks_of_nodes_with_several_workers_exchange_in_all_their_circles(make: Make) -> None:
    bench = make(4, nodes=2)

    done = bench.round(RAIL, PAIR, pair="127.0.0.1")

    assert outcomes(done) == ["measured"] * 4
    assert bench.samples(3).keys() == {"rail_allgather", "allgather"}
    assert bench.samples(3)["rail_allgather"]["world_size"] == 2
    assert bench.samples(3)["allgather"]["figures"]["latency_us"] > 0
    assert bench.samples(3)["allgather"]["figures"]["transport"] == "lo"


def test_the_workers_of_one_node_exchange_among_themselves(make: Make) -> None:
    bench = make(3)

    assert outcomes(bench.round(NODE, node="127.0.0.1")) == ["measured"] * 3


def test_arithmetic_that_is_wrong_is_found_and_is_the_nodes_fault(make: Make) -> None:
    bench = make(site=wrong_numpy.LYING)

    for probe in (VALUES, solo("matmul")):
        (done,) = bench.round(probe)
        assert (done["outcome"], done["own_fault"]) == ("failed", True)
        assert done["wrong_results"]
        assert not done["spent"]
        assert done["detail"].startswith("the processors compute wrong results: ")


def test_data_that_arrives_changed_is_a_failure_and_whose_it_was_is_said(make: Make) -> None:
    bench = make(2, nodes=2, site=wrong_numpy.CHANGED_ON_THE_WAY)

    done = bench.round(PAIR, pair="127.0.0.1")

    assert outcomes(done) == ["failed", "failed"]
    assert not any(each["own_fault"] for each in done)
    assert "rank 0 of 2 received other data than rank 1 sent" in done[0]["detail"]


def test_who_waits_for_a_partner_that_is_gone_stops_when_told_to_and_goes_on_after_it(
    make: Make,
) -> None:
    bench = make(2, nodes=2)
    bench.begin(PAIR, pair="127.0.0.1")
    bench.workers[1].kill()
    bench.hears(0, "scope")
    bench.workers[0].send({"op": "abort", "round": 7})

    done = bench.hears(0, "done")
    assert (done["outcome"], done["own_fault"]) in {("failed", False), ("timed_out", False)}
    assert bench.workers[0].ended() is None


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


def test_the_memory_of_each_numa_node_with_processors_of_the_job_is_found(tmp_path: Path) -> None:
    allowed = sorted(host.numa_nodes()[min(host.numa_nodes())])
    for name, processors in {"node0": f"{allowed[0]}", "node1": "9000-9003", "node10": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(processors + "\n")

    assert host.numa_nodes(tmp_path) == {0: {allowed[0]}}
    assert list(host.numa_nodes(tmp_path / "none")) == [0]


class Board:
    """The part of a store that a ring uses."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_stranger_that_connects_to_a_ring_holds_up_no_group(said: bytes) -> None:
    board = Board()
    rings = [Ring(rank, 2, lambda: None) for rank in range(2)]
    found: list[list[int]] = [[], []]

    def join(ring: Ring) -> None:
        with contextlib.closing(ring):
            ring.connect(board, "pair", "127.0.0.1")
            found[ring.rank] = ring.numbers(ring.rank + 7)

    first, second = (threading.Thread(target=join, args=[ring]) for ring in rings)
    first.start()
    while not board.check(["pair/at/0"]):
        time.sleep(0.01)
    with socket.create_connection(json.loads(board.get("pair/at/0"))) as stranger:
        stranger.sendall(said)
        second.start()
        first.join()
        second.join()

    assert found == [[7, 8], [7, 8]]
