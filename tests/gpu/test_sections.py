# SPDX-License-Identifier: Apache-2.0
"""A little of each section of `make gpu`, on CPUs: the same processes, over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.first_use import drop_from_memory
from benchmarks.gpu.machine import Machine, describe
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.step import SMALL, Amount, Figure

ROOT = Path(__file__).parents[2]
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
TORCH = pytest.mark.torch
pytestmark = pytest.mark.timeout(300)  # each process loads torch, at once with other tests


@pytest.fixture(scope="module")
def cpus() -> Machine:
    return describe(sys.executable, NO_GPU)


def values(machine: Machine, section: int, step: str) -> dict[str, Figure]:
    """Run one step; return its figures by name, none of which may be wrong."""
    (chosen,) = (s for s in SECTIONS[section - 1].steps(SMALL) if s.name == step)
    found = {each.name: each for each in chosen.measure(machine)}
    assert [each for each in found.values() if each.wrong] == []
    return found


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words],
        cwd=ROOT,
        env=NO_GPU,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_without_a_gpu_it_says_of_each_section_what_it_would_do(tmp_path: Path) -> None:
    done = run(f"--output={tmp_path / 'gpu.json'}")

    assert (done.returncode, done.stderr) == (0, "")
    for section in SECTIONS:
        assert f"\n{section.number} {section.title}\n" in done.stdout
        for step in section.steps(Amount()):
            assert f"    {step.name}: {step.does}\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.heavy
@TORCH
def test_the_command_writes_what_it_measured_with_the_versions(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"

    done = run("--device=cpu", "--small", "--only=3", f"--output={file}")

    assert done.returncode == 0, done
    written = json.loads(file.read_text())
    assert set(written["facts"]) >= {"torch", "driver", "collective_library", "devices"}
    (step,) = written["steps"]
    assert {each["name"] for each in step["figures"]} >= {"init, later", "threads per cycle"}
    assert "| 3 2 ranks | init, later" in done.stdout


@pytest.mark.heavy
@TORCH
def test_the_speed_of_a_probe_is_measured(cpus: Machine) -> None:
    found = values(cpus, 1, "memory_copy")

    assert found["memory_copy: rate"].unit == "GB/s"


@pytest.mark.heavy
@TORCH
def test_a_partner_of_a_killed_worker_is_timed_and_not_blamed(cpus: Machine) -> None:
    found = values(cpus, 2, "2 nodes, killed")

    assert "local0 faulty" not in str(found["verdict"].value)
    assert found["partner ended after"].value
    # It sees the exchange fail, or is told first that the killed one has: which, time decides.
    said = str(found["partner said"].value)
    assert "exchange" in said or said == "a member failed"


@pytest.mark.heavy
@TORCH
def test_memory_of_killed_processes_is_seen_to_be_free(cpus: Machine) -> None:
    found = values(cpus, 4, "0.05 GB, busy, together")

    assert {"processes gone", "memory free"} <= set(found)


@pytest.mark.heavy
@TORCH
def test_running_out_of_memory_is_no_fault_and_leaves_a_process_that_measures(
    cpus: Machine,
) -> None:
    assert "out of memory" in str(values(cpus, 5, "no memory")["without memory"].value)


@pytest.mark.heavy
@TORCH
def test_first_uses_are_timed(cpus: Machine) -> None:
    assert {"import", "context", "first product", "first collective"} <= set(
        values(cpus, 6, "warm")
    )


def test_files_are_dropped_from_memory_wherever_they_lie(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/a.so").write_bytes(b"x" * 1000)
    (tmp_path / "lib/broken").symlink_to("nowhere")

    assert drop_from_memory([str(tmp_path), "/nonexistent"]) == 1000


@pytest.mark.heavy
@TORCH
def test_every_bit_of_a_result_that_is_flipped_is_found(cpus: Machine) -> None:
    found = values(cpus, 7, "each bit")

    assert found["bits of a result that are found"].value == "32 of 32"


@pytest.mark.heavy
@TORCH
def test_variables_that_choose_devices_are_answered_as_expected(cpus: Machine) -> None:
    assert len(values(cpus, 8, "five choices")) == 5


@pytest.mark.heavy
@TORCH
def test_a_check_with_a_noisy_log_says_the_same(cpus: Machine) -> None:
    values(cpus, 9, "process group")
    assert values(cpus, 9, "check, killed")["what nodes said"].value
