# SPDX-License-Identifier: Apache-2.0
"""Which probes measure where some nodes have no torch."""

from __future__ import annotations

import pytest
from msgspec import structs

from slurm_health.preflight.session import absent
from slurm_health.preflight.session.phases import light_phases, phases, without_torch
from slurm_health.preflight.session.state import CheckState
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import (
    AgentsLaunched,
    NodesAdmitted,
    Record,
    WorkersFailed,
    WorkersReady,
)

NODES = ["n1", "n2", "n3"]
LAUNCHED = AgentsLaunched(launch=0, nodes=NODES)


def state_of(*records: Record) -> CheckState:
    state = CheckState(NODES)
    for record in (LAUNCHED, *records):
        state.fold(Entry(id="", time_s=1.0, kind="", record=record))
    return state


def lacks(node: str, accelerators: int = 0) -> WorkersFailed:
    return WorkersFailed(
        node=node, launch=0, reason="x has no torch", no_torch=True, accelerators=accelerators
    )


def ready(node: str, *, launch: int = 0, torch: str = "2.4", backend: str = "gloo") -> WorkersReady:
    return WorkersReady(
        node=node, launch=launch, store_port=1, torch=torch, backend=backend, devices=["cpu"]
    )


LIGHT = AgentsLaunched(launch=1, nodes=NODES, light="no torch")


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([], ""),
        ([ready("n1"), lacks("n2")], "n2: x has no torch"),
        ([lacks("n2"), lacks("n3")], "n2 and 1 more: x has no torch"),
        # Devices that torch can test are worth more than the node without it.
        ([ready("n1", backend="nccl"), ready("n2", backend="nccl"), lacks("n3", 8)], ""),
        ([lacks(node, 8) for node in NODES], "n1 and 2 more: x has no torch"),
        # Probes do not change once they are light or have measured.
        ([LIGHT, lacks("n2")], ""),
        ([NodesAdmitted(nodes=["n1", "n3"]), lacks("n2")], ""),
    ],
)
def test_one_node_without_torch_has_all_measured_by_light_probes(
    records: list[Record], why: str
) -> None:
    assert absent.without_torch(state_of(*records)) == why


def test_what_a_node_said_with_torch_counts_for_nothing_with_light_probes() -> None:
    said = [ready(node, launch=1, torch="", backend="tcp") for node in NODES]
    early = state_of(ready("n1"), LIGHT, *said, NodesAdmitted(nodes=NODES))
    late = state_of(LIGHT, *said, ready("n1"), NodesAdmitted(nodes=NODES))
    for state in (early, late):
        assert absent.comparable(state.agents) == NODES
        assert {each.backend for each in state.first_ready().values()} == {"tcp"}


def test_light_probes_leave_out_what_needs_torch_and_say_so() -> None:
    chosen = phases(["thorough"])

    names = {probe.name for phase in light_phases(chosen) for probe in phase.probes}
    assert {"values", "matmul", "memory_copy", "memory_pattern", "allgather"} <= names
    assert not names & {"gpt", "gpt_fit", "matmul_fp8"}
    said = without_torch("--check=light", chosen, gpus=False)
    assert said.startswith("light probes (--check=light): ")
    assert said.endswith("; matmul_fp8, host_copy, peer_copy, gpt_fit, gpt left out")


@pytest.mark.parametrize(
    ("why", "begins"),
    [
        ("n1: x has no torch", "GPUs not measured (no torch): light probes (n1: x has no torch): "),
        ("--check=light", "GPUs not measured (--check=light): processors, memory and the network"),
    ],
)
def test_what_is_said_of_nodes_with_gpus_begins_with_these(why: str, begins: str) -> None:
    light = AgentsLaunched(launch=1, nodes=NODES, light=why)
    bare, has = (
        structs.replace(ready("n1", launch=1, torch="", backend="tcp"), accelerators=count)
        for count in (0, 8)
    )

    assert not state_of(light, bare).has_accelerators()
    assert state_of(light, has).has_accelerators()
    assert without_torch(why, phases(["auto"]), gpus=True).startswith(begins)


def test_where_all_that_was_chosen_needs_torch_light_probes_measure_what_they_do_at_all() -> None:
    assert [phase.name for phase in light_phases(phases(["gpt"]))] == ["solo", "pair"]


def test_what_a_node_of_processors_does_alone_includes_its_memory_and_not_its_speed() -> None:
    (alone, pair) = light_phases(phases(["light"]))

    used = {probe.name for probe in alone.used(several_devices=False, on_cpus=True)}
    assert used == {"values", "memory_pattern"}
    used = {probe.name for probe in pair.used(several_devices=False, on_cpus=True)}
    assert used == {"matmul", "allgather"}
