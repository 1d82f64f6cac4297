# SPDX-License-Identifier: Apache-2.0
"""Two nodes write to each other by a played ib_write_bw, whose two ends meet as perftest's do."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from slurm_health.preflight.probes import ib_write_bw
from slurm_health.preflight.probes.context import ProbeContext, Sample
from tests.preflight.probes.test_adapters import write_port

TOOL = Path(__file__).parents[2] / "support/played_ib_write_bw.py"
SECOND_S = ib_write_bw.MESSAGE_BYTES * 8 / 1e9  # of one message at 1 Gbit/s


class Board:
    """What the two nodes share, as the store of a group; `stop` is an abort of the round."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self._said: dict[str, str] = {}
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def check(self) -> None:
        if self._stopped.is_set():
            raise InterruptedError

    def tell(self, name: str, text: str) -> None:
        assert name not in self._said
        self._said[name] = text

    def hear(self, name: str) -> str:
        while name not in self._said:
            self.check()
            time.sleep(0.005)
        return self._said[name]


class Nodes:
    """Two nodes with the adapters mlx5_0 and mlx5_1, and what those give."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls = directory / "calls"
        self.board = Board()
        (directory / "bin").mkdir()
        shutil.copy(TOOL, directory / "bin/ib_write_bw")
        (directory / "bin/ib_write_bw").chmod(0o755)
        for node in (0, 1):
            for adapter in ("mlx5_0", "mlx5_1"):
                write_port(directory / str(node), adapter)
        self.environs: list[dict[str, str]] = [{}, {}]
        for node in (0, 1):
            self.gives(node, mlx5_0=390.0, mlx5_1=390.0)

    def gives(self, node: int, **rates: float | str) -> None:
        file = self.directory / f"rates{node}"
        file.write_text(json.dumps(rates))
        self.environs[node] = {
            "PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}",
            "PLAYED_ADAPTERS": str(file),
            "PLAYED_CALLS": str(self.calls),
        }

    def measured(self, node: int) -> dict[str, Sample]:
        """What a node finds, with its environment for its children as well."""
        try:
            return self._measured(node, self.environs[node])
        except BaseException:
            self.board.stop()  # the other one waits for this
            raise

    def _measured(self, node: int, environ: dict[str, str]) -> dict[str, Sample]:
        context = ProbeContext(torch.device("cpu"), rank=node, world_size=2)
        mine = ib_write_bw.own_end(context, self.board, environ, self.directory / str(node))
        return {
            each.quantity: each for each in ib_write_bw.between(self.board, node, mine, environ)
        }

    def both(self) -> list[dict[str, Sample]]:
        with ThreadPoolExecutor(2) as nodes:
            return list(nodes.map(self.measured, (0, 1)))


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def gbit_per_s(sample: Sample) -> float:
    (elapsed_ms,) = sample.iteration_ms
    return SECOND_S * 1e3 / elapsed_ms


def test_each_adapter_is_measured_in_both_directions_and_the_slower_one_counts(
    nodes: Nodes,
) -> None:
    nodes.gives(0, mlx5_0=390.0, mlx5_1=390.0)
    nodes.gives(1, mlx5_0=390.0, mlx5_1=97.5)

    first, second = nodes.both()

    assert first == second  # a time belongs to both, or to none
    assert {name: gbit_per_s(each) for name, each in first.items()} == {
        "mlx5_0": pytest.approx(390.0),
        "mlx5_1": pytest.approx(97.5),
    }
    assert all(each.shared and each.total_bytes == 8 << 20 for each in first.values())
    # The node that writes measures: what the second wrote is what came to the first.
    assert first["mlx5_1"].figures == {"gbit_per_s_to_first": 97.5, "gbit_per_s_to_second": 390.0}


def test_where_the_tool_is_not_installed_nothing_is_measured_and_both_say_so(
    nodes: Nodes, tmp_path: Path
) -> None:
    nodes.environs[1]["PATH"] = str(tmp_path)

    first, second = nodes.both()

    lacks = "ib_write_bw (perftest) is not installed"
    assert first[""].figures == {"left_out": f"the other node: {lacks}"}
    assert second[""].figures == {"left_out": lacks}
    assert first[""].iteration_ms == second[""].iteration_ms == ()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_adapter_with_which_the_tool_fails_is_left_out_in_its_words(
    nodes: Nodes, failing: int
) -> None:
    nodes.gives(failing, mlx5_0=390.0, mlx5_1="Couldn't modify QP to RTR")

    for found in nodes.both():
        assert gbit_per_s(found["mlx5_0"]) == pytest.approx(390.0)
        assert found["mlx5_1"].iteration_ms == ()
        assert found["mlx5_1"].figures == {"left_out": "ib_write_bw: Couldn't modify QP to RTR"}


def test_only_adapters_that_both_nodes_have_and_nccl_uses_are_measured(nodes: Nodes) -> None:
    nodes.environs[0]["NCCL_IB_HCA"] = "=mlx5_0"
    nodes.environs[0]["NCCL_IB_GID_INDEX"] = "3"

    first, second = nodes.both()

    assert first.keys() == second.keys() == {"mlx5_0"}
    calls = [json.loads(line) for line in nodes.calls.read_text().splitlines()]
    assert len(calls) == 4
    assert all(call[call.index("-n") + 1] == "200" for call in calls)  # from memory of the hosts
    assert sum("-x" in call for call in calls) == 2


def test_nodes_that_are_played_on_one_machine_write_through_none(nodes: Nodes) -> None:
    nodes.environs[0]["NCCL_HOSTID"] = "played-1"

    first, _ = nodes.both()

    assert first[""].figures == {"left_out": "there is no adapter that NCCL would use"}


def test_a_node_whose_partner_never_comes_stops_with_the_round(nodes: Nodes) -> None:
    nodes.board.stop()

    with pytest.raises(InterruptedError):
        nodes.measured(0)


def test_memory_of_a_gpu_is_used_where_the_tool_knows_how(nodes: Nodes) -> None:
    tool = str(nodes.directory / "bin/ib_write_bw")
    words = ib_write_bw.command(tool, ib_write_bw.RunEnd("mlx5_3", 4711, gpu=2), "n1", {})

    assert words[-2:] == ["--use_cuda=2", "n1"]
    assert not ib_write_bw.takes_gpus(tool, nodes.environs[0])
    assert ib_write_bw.takes_gpus(tool, {**nodes.environs[0], "PLAYED_GPUDIRECT": "1"})


def test_it_is_known_who_listens_before_anybody_has_connected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert ib_write_bw.is_listening(port)
    assert not ib_write_bw.is_listening(port)
