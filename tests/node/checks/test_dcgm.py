# SPDX-License-Identifier: Apache-2.0
"""`dcgmi diag -j` as a program prints it: DCGM 4 gives severities, older releases words alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.external import ProgramRun
from slurm_health.node.checks.vendors import Dcgm
from slurm_health.node.rules.finding import Finding, Status
from tests.cases import cases
from tests.support.supervised import write_executable

NODE, OPEN = Status.NODE_FAULT, Status.INCONCLUSIVE
# Numbers of dcgm_errors.h; DCGM asks to isolate a GPU for both of the first.
GRAPHICS = {"error_id": 25, "error_severity": 2, "warning": "GPU 3 has graphics processes."}


def document(category: str, test: str, *results: object, root: str = "DCGM Diagnostic") -> str:
    software = {
        "name": "software",
        "results": [{"entity_group": "GPU", "entity_id": 0, "status": "Pass"}],
        "test_summary": {"status": "Pass"},
    }
    body = {
        "test_categories": [
            {"category": "Deployment", "tests": [software]},
            {"category": category, "tests": [{"name": test, "results": list(results)}]},
        ]
    }
    return json.dumps({root: body, "metadata": {"version": "4.2.3"}}, indent=4)


def failed(*errors: object, status: str = "Fail") -> dict[str, object]:
    return {"entity_group": "GPU", "entity_id": 3, "status": status, "warnings": list(errors)}


def run(tmp_path: Path, output: str, code: int = 0) -> Finding:
    (tmp_path / "output").write_text(output)
    text = f'#!/bin/sh\n[ "$*" = "diag -r 2 -j" ] || exit 9\ncat {tmp_path}/output\nexit {code}\n'
    program = write_executable(tmp_path / "dcgmi", text)
    check = Dcgm(program=str(program))
    return check.measure(CheckContext())


@cases("node/checks/dcgm.toml")
def test_what_failed_is_named_and_weighs_what_dcgm_says_it_weighs(
    tmp_path: Path, error: object, status: Status, said: str
) -> None:
    found = run(tmp_path, document("Hardware", "memory", failed(error)), code=226)

    assert found.status is status
    assert said in found.text


OLD = "DCGM GPU Diagnostic"
LINK = {"gpu_id": "3", "status": "FAIL", "warnings": "GPU 3's NvLink link 5 is currently down"}
PAGES = {"gpu_ids": "3", "status": "Fail", "warnings": "Pending page retirements"}
NOTHING = "tested no hardware"


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [
        (
            document("Hardware", "memory", failed(status="Pass")),
            Status.PASS,
            "dcgmi diag, level 2: all tests passed",
        ),
        # An older DCGM gives words alone, which convict no GPU but of a link that is down.
        (document("Hardware", "memory", PAGES, root=OLD), OPEN, "GPU 3: memory: Pending page"),
        (document("Integration", "PCIe", LINK, root=OLD), NODE, f"GPU 3: PCIe: {LINK['warnings']}"),
        # What tests no hardware is no pass, whatever it finds.
        *(
            (document("Hardware", "memory", failed(status=word)), OPEN, f"{NOTHING} (skipped: memo")
            for word in ("Skip", "SKIP", "Not Run")
        ),
        (document("Deployment", "software", failed(GRAPHICS)), OPEN, NOTHING),
    ],
)
def test_words_alone_convict_no_gpu_and_no_test_is_no_pass(
    tmp_path: Path, output: str, status: Status, said: str
) -> None:
    found = run(tmp_path, output)
    assert found.status is status
    assert said in found.text


@cases("node/checks/dcgm.toml")
def test_level_1_has_no_hardware_test_and_passes_by_what_it_has(
    test: str, result: dict[str, str], status: Status
) -> None:
    text = document("Deployment", test, result, root=OLD)
    assert Dcgm(level=1).judge(ProgramRun(code=0, output=text)).status is status


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("Error: unable to establish a connection to the specified host: localhost", "unable to"),
        ('{"DCGM Diagnostic": {"runtime_error": "nvvs is missing"}}', "nvvs is missing"),
        (document("Hardware", "memory").replace('"Pass"', '"Skip"'), "ran no test"),
        ('{"DCGM Diagnostic": []}', "no result"),
        ("", "exit code 1"),
    ],
)
def test_a_diagnostic_that_failed_decides_nothing(tmp_path: Path, output: str, said: str) -> None:
    found = run(tmp_path, output, code=1)

    assert found.status is Status.INCONCLUSIVE
    assert said in found.text
