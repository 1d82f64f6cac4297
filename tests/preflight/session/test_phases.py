# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from slurm_health.preflight.expectations import (
    COPY_BYTES,
    MATMUL_FLOP,
    expectations_from,
    expected_ms,
)
from slurm_health.preflight.session.phases import Phase, phases
from slurm_health.records.probe_catalog import BUILT_IN, SETS, STORAGE, Metric, Probe, Scope

OWN = Probe("dataloader", Scope.SOLO, "/p.py")


def probes_of(*chosen: str) -> dict[str, list[str]]:
    return {phase.name: [p.name for p in phase.probes] for phase in phases(chosen, [OWN])}


def used(phase: Phase, *, several_devices: bool = True, on_cpus: bool = False) -> list[str]:
    return [each.name for each in phase.used(several_devices=several_devices, on_cpus=on_cpus)]


@pytest.mark.parametrize(
    ("chosen", "probes"),
    [
        (["quick"], {"pair": ["matmul", "allgather"]}),
        (["gpt"], {"size": ["gpt_fit"], "gpt": ["gpt"]}),
        (["straggler-detection"], {"size": ["gpt_fit"], "gpt": ["gpt"]}),
        (["matmul"], {"solo": ["matmul"]}),
        (["values", "dataloader"], {"solo": ["values", "dataloader"]}),
    ],
)
def test_a_check_has_the_phases_that_its_probes_need(
    chosen: list[str], probes: dict[str, list[str]]
) -> None:
    assert probes_of(*chosen) == probes
    standard = probes_of("standard")
    assert list(standard) == ["solo", "pair"]
    assert standard["solo"] == ["values", "matmul", "memory_copy", "node_allgather"]


def test_a_thorough_check_ends_with_training_on_the_survivors() -> None:
    assert list(probes_of("thorough")) == ["solo", "pair", "size", "gpt"]
    assert all(phase.survivors_only for phase in phases(["thorough"])[2:])


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


@pytest.mark.parametrize(
    ("chosen", "number", "seconds"),
    [("quick", 0, 0), ("standard", 0, 3), ("thorough", 0, 3 + 8), ("thorough", 3, 10)],
)
def test_a_round_gets_time_for_its_burn_and_its_training(
    chosen: str, number: int, seconds: float
) -> None:
    assert phases([chosen])[number].extra_s() == pytest.approx(seconds)


def test_every_probe_finds_faults_of_a_known_part() -> None:
    parts = {Metric(probe=probe.name).component for probe in BUILT_IN}

    assert parts == {"compute", "memory", "links", "network"}


def test_every_probe_of_a_set_exists_and_every_probe_is_in_the_thorough_set() -> None:
    names = {probe.name for probe in BUILT_IN}

    assert {name for names_of_set in SETS.values() for name in names_of_set} == names | {STORAGE}
    assert set(SETS["thorough"]) == names | {STORAGE}


@pytest.mark.parametrize(
    ("metric", "component"),
    [
        (Metric(probe="matmul"), "compute"),
        (Metric(probe="matmul", model="NVIDIA H200", part="device 3"), "compute"),
        (Metric(probe="memory_copy"), "memory"),
        (Metric(probe="rail_allgather"), "network"),
        (Metric(probe="gpt", quantity="light_compute"), "compute"),
        (Metric(probe="gpt", quantity="communication"), "network"),
        (Metric(probe="dataloader"), "dataloader"),
    ],
)
def test_a_metric_is_about_one_part_of_a_node(metric: Metric, component: str) -> None:
    assert metric.component == component


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (Metric(probe="allgather"), "allgather"),
        (Metric(probe="gpt", quantity="step"), "gpt step"),
        (Metric(probe="rail_allgather", part="rail 5"), "rail_allgather:rail 5"),
        (
            Metric(probe="matmul", model="NVIDIA H200", part="device 3"),
            "matmul on NVIDIA H200:device 3",
        ),
    ],
)
def test_a_metric_reads_the_same_wherever_it_is_named(metric: Metric, text: str) -> None:
    assert str(metric) == text


KNOWN = expectations_from({}, "site")


def test_a_known_device_is_held_against_its_peak_and_an_unknown_one_against_nothing() -> None:
    slack = 1.25
    found = expected_ms({"n1": "NVIDIA H200", "n2": "NVIDIA H200"}, KNOWN, slack)

    assert found["matmul"] * slack == pytest.approx(MATMUL_FLOP / (989e9 * 0.55))
    assert found["memory_copy"] * slack == pytest.approx(COPY_BYTES / (4800e6 * 0.55))
    assert expected_ms({"n1": "cpu with 2 threads"}, KNOWN) == {}


def test_each_of_several_models_has_its_own_expectation() -> None:
    found = expected_ms({"n1": "NVIDIA H200", "n2": "NVIDIA L40S", "n3": "cpu"}, KNOWN)

    assert sorted(found) == [
        "matmul on NVIDIA H200",
        "matmul on NVIDIA L40S",
        "memory_copy on NVIDIA H200",
        "memory_copy on NVIDIA L40S",
    ]
    assert found["matmul on NVIDIA H200"] < found["matmul on NVIDIA L40S"]
