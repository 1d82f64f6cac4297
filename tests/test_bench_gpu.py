# SPDX-License-Identifier: Apache-2.0
"""`make gpu` runs on CPUs, where there is no GPU: one is lent seldom, and then it has to work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(300)  # each of its processes loads torch, beside other tests
def test_a_little_of_what_a_gpu_shows_is_measured_on_cpus(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    words = ["--device=cpu", "--small", f"--output={file}", f"--python={sys.executable}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(file.read_text())
    assert set(written["facts"]) >= {"torch", "driver", "collective_library", "devices"}
    assert {step["section"] for step in written["steps"]} == set(range(1, 10))
    names = {figure["name"] for step in written["steps"] for figure in step["figures"]}
    assert names >= {"memory_copy: rate", "init, later", "bits of a result that are found"}
