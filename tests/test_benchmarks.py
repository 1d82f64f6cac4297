# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run: `make gpu` on CPUs, as a GPU is lent seldom and then it has to work; `scale`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(name: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *words],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)  # each of its processes loads torch, beside other tests
def test_a_little_of_what_a_gpu_shows_is_measured_on_cpus(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    run("gpu", "--device=cpu", "--small", f"--output={file}", f"--python={sys.executable}")

    written = json.loads(file.read_text())
    assert set(written["facts"]) >= {"torch", "driver", "collective_library", "devices"}
    assert {step["section"] for step in written["steps"]} == set(range(1, 10))
    names = {figure["name"] for step in written["steps"] for figure in step["figures"]}
    assert names >= {"memory_copy: rate", "init, later", "bits of a result that are found"}


def test_a_simulated_check_of_64_nodes_names_the_bad_ones_and_reads_little(tmp_path: Path) -> None:
    options = ("--nodes=64", "--bad=5", "--open-ms=1", "--check=quick", "--leaf=32")
    row = json.loads(run("scale", f"--here={tmp_path}", *options))

    assert row["right"], row
    assert row["agents read MB"] < 5
