# SPDX-License-Identifier: Apache-2.0
"""The simulation of large checks keeps up with the code that it drives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_simulated_check_of_64_nodes_names_the_bad_ones_and_reads_little(tmp_path: Path) -> None:
    options = ["--nodes=64", "--bad=5", "--open-ms=1", "--check=quick", "--leaf=32"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", f"--here={tmp_path}", *options],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr.decode()
    row = json.loads(done.stdout)
    assert row["right"], row
    assert row["agents read MB"] < 5
