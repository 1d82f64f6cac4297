# SPDX-License-Identifier: Apache-2.0
"""Which probes measure, in which phases, with torch and where some nodes have none."""

import pytest
from msgspec import structs

from slurm_health.preflight.expectations import expectations_from, expected_ms
from slurm_health.preflight.session import absent
from slurm_health.preflight.session.phases import light_phases, phases, without_torch
from slurm_health.preflight.session.state import CheckState
from slurm_health.records.probe_catalog import Metric, Probe, Scope
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import (
    AgentsLaunched,
    NodesAdmitted,
    Record,
    WorkersFailed,
    WorkersReady,
)
from tests.support.rows import rows

OWN = Probe("dataloader", Scope.SOLO, "/p.py")


@rows
def test_a_check_has_the_phases_that_its_probes_and_its_nodes_need(
    chosen: list[str], where: str, probes: dict[str, list[str]]
) -> None:
    course = phases(chosen, [OWN])
    if "light" in where:
        course = light_phases(course)
    used = {
        phase.name: phase.used(several_devices="one device" not in where, on_cpus="cpus" in where)
        for phase in course
    }

    assert {name: [probe.name for probe in of_phase] for name, of_phase in used.items()} == probes


@rows
def test_a_metric_reads_the_same_everywhere_and_is_about_one_part_of_a_node(
    metric: Metric, text: str, component: str
) -> None:
    assert (str(metric), metric.component) == (text, component)


def test_each_of_several_models_has_its_own_expectation() -> None:
    models = {"n1": "NVIDIA H200", "n2": "NVIDIA L40S", "n3": "cpu"}
    found = expected_ms(models, expectations_from({}, "site"))

    assert sorted(found) == [
        "matmul on NVIDIA H200",
        "matmul on NVIDIA L40S",
        "memory_copy on NVIDIA H200",
        "memory_copy on NVIDIA L40S",
    ]
    assert found["matmul on NVIDIA H200"] < found["matmul on NVIDIA L40S"]


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
    said = without_torch("--check=light", phases(["thorough"]), gpus=False)
    assert said.startswith("light probes (--check=light): ")
    assert said.endswith("; host_copy, peer_copy, gpt_fit, gpt left out")


@rows
def test_what_is_said_of_nodes_with_gpus_begins_with_these(why: str, begins: str) -> None:
    light = AgentsLaunched(launch=1, nodes=NODES, light=why)
    bare, has = (
        structs.replace(ready("n1", launch=1, torch="", backend="tcp"), accelerators=count)
        for count in (0, 8)
    )

    assert not state_of(light, bare).has_accelerators()
    assert state_of(light, has).has_accelerators()
    assert without_torch(why, phases(["auto"]), gpus=True).startswith(begins)
