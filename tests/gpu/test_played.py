# SPDX-License-Identifier: Apache-2.0
"""A little of each section of `make gpu` on played GPUs: PyTorch's CUDA build, over NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.step import SMALL, Section
from tests.played_gpu.description import GIB, VARIABLE, Device, machine, write

ROOT = Path(__file__).parents[2]
PLAYED = Device(memory_bytes=4 * GIB, tflops=0.002, memory_gb_per_s=8.0)


@pytest.mark.played_gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: str(section.number))
def test_each_section_finds_played_devices_well(
    section: Section, played_python: Path, tmp_path: Path
) -> None:
    write(tmp_path / "gpus", machine(2, PLAYED, seed=str(tmp_path)))
    output = tmp_path / "gpu.json"
    argv = [sys.executable, "-m", "benchmarks.gpu", "--small", f"--only={section.number}"]
    done = subprocess.run(
        [*argv, f"--python={played_python}", f"--output={output}", "--budget=1000"],
        cwd=ROOT,
        env={**os.environ, VARIABLE: str(tmp_path / "gpus"), "CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    steps = {each.name for each in section.steps(SMALL)}
    assert {each["step"] for each in json.loads(output.read_text())["steps"]} == steps
