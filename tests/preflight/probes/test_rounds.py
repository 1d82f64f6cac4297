# SPDX-License-Identifier: Apache-2.0
"""Real workers with the real torch: one after another serves rounds as the agent would ask."""

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.preflight.agent.worker_process import end_together
from tests.preflight.probes import wrong_torch
from tests.preflight.probes.probe_bench import VALUES, Bench, solo
from tests.support.rows import rows
from tests.support.supervised import descendants, write_executable


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """One worker for all that need nothing special of it, as an agent keeps one for all rounds."""
    bench = Bench()
    bench.get_ready()
    yield bench
    end_together(bench.workers)


def test_a_node_by_itself_is_measured_in_all_it_can_do_alone(bench: Bench) -> None:
    (done,) = bench.round(VALUES, solo("matmul"), solo("memory_copy"))

    assert done["outcome"] == "measured"
    samples = bench.samples()
    assert samples["values"]["figures"]["wrong"] == 0
    assert samples["matmul"]["flop"] > 0
    assert samples["memory_copy"]["total_bytes"] > 0
    assert all(
        ms > 0 for probe in ("matmul", "memory_copy") for ms in samples[probe]["iteration_ms"]
    )
    assert bench.ready[0]["free_bytes"] > 0
    assert bench.ready[0]["model"].endswith("with 1 thread")


def test_a_worker_that_dies_leaves_no_core_file(bench: Bench) -> None:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(os.getpid())}
    (worker,) = (pid for pid, words in commands.items() if "worker.py" in words)
    limits = Path(f"/proc/{worker}/limits").read_text().splitlines()

    (core,) = (line.split() for line in limits if line.startswith("Max core file size"))
    assert core[4:6] == ["0", "0"]


@pytest.mark.heavy
def test_two_devices_of_a_node_exchange_data_and_each_rail_by_itself(make: type[Bench]) -> None:
    bench = make(2)
    probe = {"name": "node_allgather", "scope": "node", "path": ""}
    done = bench.round(solo("matmul"), probe, node="127.0.0.1")

    assert [each["outcome"] for each in done] == ["measured", "measured"]
    sample = bench.samples(1)["node_allgather"]
    assert (sample["scope"], sample["world_size"]) == ("node", 2)
    assert bench.samples(1)["matmul"]["scope"] == "solo"


def test_processors_that_calculate_wrongly_are_found_and_are_at_fault(
    make: type[Bench], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(wrong_torch.SITECUSTOMIZE)
    bench = make(PYTHONPATH=str(tmp_path))

    (done,) = bench.round(VALUES)

    assert (done["outcome"], done["own_fault"], done["wrong_results"]) == ("failed", True, True)
    assert done["detail"].startswith("the processors compute wrong results: 2 of 524288 values")


def test_the_burn_ends_with_exact_products_so_that_a_hot_device_is_found_too(
    make: type[Bench], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(wrong_torch.SITECUSTOMIZE)
    bench = make(PYTHONPATH=str(tmp_path))
    assert bench.round(solo("matmul"))[0]["outcome"] == "measured"
    bench.options = {"burn_s": 3.0}

    (done,) = bench.round(solo("matmul"))

    assert (done["outcome"], done["wrong_results"]) == ("failed", True)


def test_an_interface_that_does_not_exist_is_no_fault_and_is_named(make: type[Bench]) -> None:
    bench = make(GLOO_SOCKET_IFNAME="ib7")

    (done,) = bench.round({"name": "allgather", "scope": "pair", "path": ""}, pair="127.0.0.1")

    assert (done["outcome"], done["own_fault"]) == ("unmeasured", False)
    assert "GLOO_SOCKET_IFNAME names the interface ib7, but this node has" in done["detail"]


@rows
def test_the_exit_code_of_a_program_is_its_finding(
    bench: Bench, tmp_path: Path, code: int, outcome: str, own_fault: bool
) -> None:
    script = f"#!/bin/sh\necho first >&2; echo 'disk is slow' >&2; exit {code}\n"
    program = write_executable(tmp_path / "mine.sh", script)

    (done,) = bench.round(solo("mine.sh", str(program)))

    assert (done["outcome"], done["own_fault"]) == (outcome, own_fault)
    if code:
        assert done["detail"].startswith("mine.sh: disk is slow")


OWN_PROBE = """
from slurm_health.preflight.probes.context import NodeFault, Sample

def measure(context):
    {body}
"""


@rows
def test_a_probe_of_ones_own_is_one_file(
    bench: Bench, tmp_path: Path, body: str, outcome: str, own_fault: bool, detail: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN_PROBE.format(body=body))

    (done,) = bench.round(solo("mine", str(path)))

    assert (done["outcome"], done["own_fault"]) == (outcome, own_fault)
    assert detail in done["detail"]


def test_the_python_file_that_is_shown_as_a_probe_is_one(bench: Bench, tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs/reference/probes.md").read_text()
    begin = text.index("    # embedding_probe.py")
    path = tmp_path / "embedding_probe.py"
    path.write_text(textwrap.dedent(text[begin : text.index("It is found through")]))

    (done,) = bench.round(solo("embedding", str(path)))

    assert done["outcome"] == "measured"
    assert len(bench.samples()["embedding"]["iteration_ms"]) == 10


# The workers of the first rail come 0.6 s later. Each worker says with whom it is on its rail, and
# when it was past the meeting.
RAIL_PROBE = """
import time
import torch
import torch.distributed as dist
from slurm_health.preflight.probes.context import Sample

def measure(context):
    if context.local_rank == 0:
        time.sleep(0.6)
    mine = torch.tensor([dist.get_rank()])
    rail = [torch.zeros_like(mine) for _ in range(context.world_size)]
    dist.all_gather(rail, mine, group=context.group)
    came_s = time.time()
    context.meet()
    figures = {"rail": str([int(each) for each in rail]), "came_s": came_s, "met_s": time.time()}
    return [Sample(figures=figures)]
"""


@pytest.mark.slow
def test_rails_are_parts_of_the_group_of_a_pair_and_begin_together(
    make: type[Bench], tmp_path: Path
) -> None:
    bench = make(4, nodes=2)
    path = tmp_path / "mine.py"
    path.write_text(RAIL_PROBE)

    done = bench.round(
        {"name": "mine", "scope": "rail", "path": str(path)},
        {"name": "rail_allgather", "scope": "rail", "path": ""},
        {"name": "allgather", "scope": "pair", "path": ""},
        pair="127.0.0.1",
    )

    assert [each["outcome"] for each in done] == ["measured"] * 4
    found = [bench.samples(rank) for rank in range(4)]
    assert [each["mine"]["figures"]["rail"] for each in found] == ["[0, 2]", "[1, 3]"] * 2
    came_s, met_s = (
        [each["mine"]["figures"][name] for each in found] for name in ("came_s", "met_s")
    )
    assert min(met_s) >= max(came_s)
    assert [each["rail_allgather"]["world_size"] for each in found] == [2] * 4
    assert [each["allgather"]["world_size"] for each in found] == [4] * 4
    assert {each["allgather"]["figures"]["transport"] for each in found} == {"lo"}


@pytest.mark.heavy
def test_a_rail_that_waits_for_the_others_hears_an_abort(make: type[Bench], tmp_path: Path) -> None:
    bench = make(4, nodes=2)
    path = tmp_path / "mine.py"
    path.write_text(
        "import time\n\ndef measure(context):\n"
        "    if context.local_rank:\n        time.sleep(3600)\n    context.meet()\n"
    )
    probe = {"name": "mine", "scope": "rail", "path": str(path)}
    bench.begin(probe, pair="127.0.0.1")
    for worker in bench.workers:
        worker.send({"op": "abort", "round": 7})

    assert [bench.hears(rank, "done")["outcome"] for rank in (0, 2)] == ["timed_out"] * 2


@pytest.mark.heavy
def test_data_that_arrives_changed_is_a_failure_and_whose_it_was_is_said(
    make: type[Bench], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(wrong_torch.CHANGED_ON_THE_WAY)
    bench = make(2, nodes=2, PYTHONPATH=str(tmp_path))

    done = bench.round({"name": "allgather", "scope": "pair", "path": ""}, pair="127.0.0.1")

    assert [(each["outcome"], each["own_fault"]) for each in done] == [
        ("failed", False),
        ("measured", False),
    ]
    assert "rank 0 of 2 received other data than rank 1 sent" in done[0]["detail"]
