# SPDX-License-Identifier: Apache-2.0
"""A filesystem that hangs for real, in the kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.journals import write_healthy_run


def met_twice(what: str, tmp_path: Path, hung: str = "hung") -> Any:
    """Have something of the hooks meet a filesystem that hangs, and meet it again."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no /dev/fuse")
    (tmp_path / hung).mkdir(parents=True, exist_ok=True)
    places = [str(tmp_path / name) for name in (hung, "state")]
    argv = [sys.executable, "-m", "tests.node.hooks.hung_filesystem", what, *places]
    root = Path(__file__).parents[3]
    ran = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    if "unshare: Operation not permitted" in ran.stderr or "mount: " in ran.stderr:
        pytest.skip(f"cannot mount here: {ran.stderr.splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.heavy
@pytest.mark.root
def test_a_dead_filesystem_costs_its_time_limit_and_a_child(tmp_path: Path) -> None:
    (elapsed_s, results, waiting), (_, results_again, waiting_again) = met_twice("checks", tmp_path)
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


@pytest.mark.heavy
@pytest.mark.root
@pytest.mark.parametrize("what", ["journal", "ledger"])
def test_no_child_follows_one_that_the_kernel_holds(what: str, tmp_path: Path) -> None:
    (_, said, waiting), (_, said_again, waiting_again) = met_twice(what, tmp_path)
    assert "within 3" in said
    assert waiting == waiting_again == 1
    assert "3 s" not in said_again  # the time limit of the first
    assert "in the kernel" in said_again


@pytest.mark.heavy
@pytest.mark.root
def test_a_step_whose_command_the_kernel_holds_has_failed(tmp_path: Path) -> None:
    for times, (_, outcome, said, waiting) in enumerate(met_twice("command", tmp_path), start=1):
        assert (outcome, said) == ("failed", "stat did not end within 3 s")
        assert waiting == times


@pytest.mark.heavy
@pytest.mark.root
def test_what_hangs_over_three_users_journals_hides_no_other(public_path: Path) -> None:
    (public_path / "root" / "lab").mkdir(parents=True)
    for said, waiting in met_twice("trick", public_path, "root/lab/7"):
        assert all("within 3 s" in each or "in the kernel" in each for each in said[:3])
        assert said[3] == "it was read"
        assert waiting == 3


@pytest.mark.heavy
@pytest.mark.root
def test_what_a_user_mounts_over_a_job_keeps_root_from_no_other_job(tmp_path: Path) -> None:
    write_healthy_run(tmp_path / "root", job=8)
    for jobs, troubles, waiting in met_twice("owners", tmp_path, "root/lab/7"):
        assert jobs == ["8"]
        assert list(troubles) == ["no answer within 5 s"]
        assert waiting > 0
