# SPDX-License-Identifier: Apache-2.0
"""A filesystem that hangs for real, in the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.root
def test_a_dead_filesystem_costs_its_time_limit_and_its_child_is_left_behind(
    tmp_path: Path,
) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no /dev/fuse")
    (tmp_path / "hung").mkdir()
    places = [str(tmp_path / name) for name in ("hung", "state")]
    argv = [sys.executable, "-m", "tests.hooks.hung_filesystem", *places]
    root = Path(__file__).parents[2]
    ran = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    if "unshare: Operation not permitted" in ran.stderr or "mount: " in ran.stderr:
        pytest.skip(f"cannot mount here: {ran.stderr.splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr
    (elapsed_s, results, waiting), (_, results_again, waiting_again) = json.loads(ran.stdout)
    found = {name: (status, text) for name, status, text in results}
    assert elapsed_s < 50
    status, text = found["hung"]
    assert status == "inconclusive"
    assert text == ("did not end within 3 s and cannot be killed (its process waits in the kernel)")
    assert found["memory"][0] == "pass"
    # No other child is sent after the one that the kernel holds.
    found = {name: (status, text) for name, status, text in results_again}
    status, text = found["hung"]
    assert status == "inconclusive"
    assert "of an earlier run waits in the kernel" in text
    assert found["memory"][0] == "pass"
    assert 0 < waiting_again <= waiting
