# SPDX-License-Identifier: Apache-2.0
"""The benchmark of many nodes plays a part of the agents: it must keep up with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from slurm_health.preflight.master.master import OPENS_PER_S


def test_the_simulation_of_many_nodes_comes_to_the_right_verdict() -> None:
    argv = [sys.executable, "-m", "benchmarks.scale", "--nodes=64", "--bad=2", "--json"]
    done = subprocess.run(
        argv, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["nodes"], row["right"]) == (64, True)


def test_without_a_bell_files_are_looked_into_no_more_often_than_agreed() -> None:
    argv = [sys.executable, "-m", "benchmarks.scale", "--nodes=64", "--bad=0", "--cut", "--json"]
    done = subprocess.run(
        argv, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["polls/s"] <= OPENS_PER_S


def test_a_check_with_real_agents_comes_to_the_right_verdict() -> None:
    argv = [sys.executable, "-m", "benchmarks.scale_agents", "--nodes=2"]
    done = subprocess.run(
        argv, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "launch to verdict" in done.stdout
