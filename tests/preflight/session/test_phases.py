# SPDX-License-Identifier: Apache-2.0
"""Which probes measure, in which phases, with torch and where some nodes have none."""

from __future__ import annotations

import pytest
from msgspec import structs

from slurm_health.preflight.expectations import (
    expectations_from,
    expected_ms,
)
from slurm_health.preflight.session import absent
from slurm_health.preflight.session.phases import Phase, light_phases, phases, without_torch
from slurm_health.preflight.session.state import CheckState
from slurm_health.records.probe_catalog import BUILT_IN, SETS, STORAGE, Metric, Probe, Scope
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


def probes_of(*chosen: str) -> dict[str, list[str]]:
    return {phase.name: [p.name for p in phase.probes] for phase in phases(chosen, [OWN])}


def used(phase: Phase, *, several_devices: bool = True, on_cpus: bool = False) -> list[str]:
    return [each.name for each in phase.used(several_devices=several_devices, on_cpus=on_cpus)]


@rows
def test_a_check_has_the_phases_that_its_probes_need(
    chosen: list[str], probes: dict[str, list[str]]
) -> None:
    assert probes_of(*chosen) == probes
    standard = probes_of("standard")
    assert list(standard) == ["solo", "pair"]
    assert standard["solo"] == ["values", "matmul", "memory_copy", "node_allgather"]


def test_sets_and_probes_are_united_whatever_their_order() -> None:
    assert probes_of("network-check", "straggler-detection") == {
        **probes_of("network-check"),
        **probes_of("straggler-detection"),
    }
    assert probes_of("allgather", "quick") == probes_of("quick")


def test_a_name_of_no_probe_is_an_error() -> None:
    with pytest.raises(KeyError, match="matmull"):
        phases(["matmull"])


def test_probes_that_need_several_devices_are_left_out_where_no_node_has_them() -> None:
    pair = phases(["standard"])[1]

    assert used(pair, several_devices=False) == ["matmul", "allgather"]
    assert "rail_allgather" in used(pair, several_devices=True)


def test_what_others_on_a_cpu_node_disturb_is_measured_there_only_if_it_is_asked_for() -> None:
    standard, thorough, asked = (
        phases([*chosen])[0] for chosen in (["standard"], ["thorough"], ["standard", "memory_copy"])
    )

    assert used(standard, on_cpus=True) == ["values", "node_allgather"]
    assert used(standard, on_cpus=False)[:3] == ["values", "matmul", "memory_copy"]
    assert used(thorough, on_cpus=True)[:3] == ["values", "matmul", "memory_copy"]
    assert used(asked, on_cpus=True) == ["values", "memory_copy", "node_allgather"]


def test_what_only_accelerators_have_is_measured_on_cpus_only_if_it_is_asked_for() -> None:
    thorough, asked = (phases([*chosen])[0] for chosen in (["thorough"], ["thorough", "host_copy"]))

    assert {"memory_pattern", "host_copy"} <= {*used(thorough)}
    assert {"memory_pattern", "host_copy"}.isdisjoint(used(thorough, on_cpus=True))
    assert "host_copy" in used(asked, on_cpus=True)


def test_every_probe_of_a_set_exists_and_every_probe_is_in_the_thorough_set() -> None:
    names = {probe.name for probe in BUILT_IN}

    assert {name for names_of_set in SETS.values() for name in names_of_set} == names | {STORAGE}
    assert set(SETS["thorough"]) == names | {STORAGE}


@rows
def test_a_metric_reads_the_same_everywhere_and_is_about_one_part_of_a_node(
    metric: Metric, text: str, component: str
) -> None:
    assert (str(metric), metric.component) == (text, component)


KNOWN = expectations_from({}, "site")


def test_each_of_several_models_has_its_own_expectation() -> None:
    found = expected_ms({"n1": "NVIDIA H200", "n2": "NVIDIA L40S", "n3": "cpu"}, KNOWN)

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
    chosen = phases(["thorough"])

    names = {probe.name for phase in light_phases(chosen) for probe in phase.probes}
    assert {"values", "matmul", "memory_copy", "memory_pattern", "allgather"} <= names
    assert not names & {"gpt", "gpt_fit", "host_copy"}
    said = without_torch("--check=light", chosen, gpus=False)
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


def test_where_all_that_was_chosen_needs_torch_light_probes_measure_what_they_do_at_all() -> None:
    assert [phase.name for phase in light_phases(phases(["gpt"]))] == ["solo", "pair"]


def test_what_a_node_of_processors_does_alone_includes_its_memory_and_not_its_speed() -> None:
    (alone, pair) = light_phases(phases(["light"]))

    used = {probe.name for probe in alone.used(several_devices=False, on_cpus=True)}
    assert used == {"values", "memory_pattern"}
    used = {probe.name for probe in pair.used(several_devices=False, on_cpus=True)}
    assert used == {"matmul", "allgather"}
