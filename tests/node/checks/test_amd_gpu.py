# SPDX-License-Identifier: Apache-2.0
"""What AMD's tool tells of GPUs and their links, in the form that it prints."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.vendors import AmdGpus
from slurm_health.node.rules.finding import Finding, Remedy, Status
from tests.node.checks.conftest import find_out, printing

NODE, WARN, OPEN = Status.NODE_FAULT, Status.WARN, Status.INCONCLUSIVE


def amd(number: int, **changes: object) -> dict[str, object]:
    throttle = {"prochot_violation_status": "NOT ACTIVE", "ppt_violation_status": "ACTIVE"}
    ecc = {"total_correctable_count": 4, "total_uncorrectable_count": 0}
    return {"gpu": number, "ecc": ecc, "throttle": throttle, **changes}


def links(number: int, shut: int | None = None) -> dict[str, object]:
    def link(other: int) -> dict[str, object]:
        kind = "SELF" if other == number else "XGMI"
        status = "DISABLED" if other == shut else "ENABLED"
        return {"gpu": other, "link_status": status, "link_type": kind}

    return {
        "gpu": number,
        "bdf": f"0000:0{number}:00.0",
        "links": [link(other) for other in range(3)],
    }


TOPOLOGY = json.dumps([links(number) for number in range(3)])


def ask_amd(tmp_path: Path, check: AmdGpus, metrics: object, topology: str = TOPOLOGY) -> Finding:
    answers = {"metric --json": json.dumps(metrics), "topology --json": topology}
    program = printing(tmp_path, "amd-smi", answers)
    return find_out(msgspec.structs.replace(check, program=program), CheckContext())


@pytest.mark.parametrize("wrap", [False, True])
def test_amd_gpus_that_are_well_pass_at_their_power_cap_in_both_forms_of_the_output(
    tmp_path: Path, wrap: bool
) -> None:
    gpus = [amd(number) for number in range(3)]
    metrics = {"gpu_data": gpus} if wrap else gpus

    found = ask_amd(tmp_path, AmdGpus(count=3), metrics)

    assert (found.status, found.text) == (Status.PASS, "3 AMD GPUs healthy")


@pytest.mark.parametrize(
    ("gpu", "status", "said"),
    [
        ({"ecc": {"total_uncorrectable_count": 2}}, NODE, "GPU 1 has 2 uncorrected ECC errors"),
        ({"ecc": {"total_uncorrectable_count": "N/A"}}, Status.PASS, "healthy"),
        ({"ecc": "N/A", "throttle": "N/A"}, Status.PASS, "healthy"),
        (
            {"throttle": {"hbm_thermal_violation_status": "ACTIVE"}},
            WARN,
            "GPU 1 is throttled: heat of the memory",
        ),
    ],
)
def test_an_amd_gpu_is_judged_by_what_it_says(
    tmp_path: Path, gpu: dict[str, object], status: Status, said: str
) -> None:
    found = ask_amd(tmp_path, AmdGpus(count=3), [amd(0), amd(1, **gpu), amd(2)])

    assert found.status is status
    assert said in found.text
    assert found.remedy is (Remedy.REBOOT if status is NODE else None)


def test_a_gpu_that_is_gone_and_an_xgmi_link_that_is_shut_are_faults(tmp_path: Path) -> None:
    two = ask_amd(tmp_path, AmdGpus(count=3), [amd(0), amd(1)])
    topology = json.dumps([links(0), links(1, shut=2), links(2)])
    shut = ask_amd(tmp_path, AmdGpus(), [amd(0), amd(1), amd(2)], topology)

    assert (two.status, two.text) == (NODE, "2 AMD GPUs, expected 3")
    assert (shut.status, shut.text) == (NODE, "GPU at 0000:01:00.0 has an XGMI link that is shut")


def test_a_retest_that_does_not_know_how_many_amd_gpus_there_should_be_returns_no_node(
    tmp_path: Path,
) -> None:
    program = printing(tmp_path, "amd-smi", {"metric --json": json.dumps([amd(0)])})

    found = find_out(AmdGpus(program=program), CheckContext(context="retest"))

    assert found.status is OPEN
