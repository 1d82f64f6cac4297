# SPDX-License-Identifier: Apache-2.0
"""What root runs and others can change is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.node.doctor.conftest import GOOD, levels
from tests.support.supervised import write_executable


@pytest.mark.parametrize(
    "path",
    ["hook", "opt", "opt/python", "opt/lib", "opt/lib/slurm_health/node/hooks.py", "slurm/bin"],
)
def test_what_root_runs_and_others_can_change_is_found(
    hook: Path, tmp_path: Path, path: str
) -> None:
    loose = tmp_path / path
    loose.chmod(0o775)
    (told,) = levels(GOOD.format(hook=hook))["change"]
    assert "root runs" in told
    assert str(loose) in told
    loose.chmod(0o755)
    if os.getuid() == 0:
        os.chown(loose, 1000, 1000)
        assert str(loose) in levels(GOOD.format(hook=hook))["change"][0]


def test_an_interpreter_that_others_can_change_is_not_run(hook: Path, tmp_path: Path) -> None:
    """Doctor runs as root too."""
    python = tmp_path / "opt/python"
    write_executable(python, f"#!/bin/sh\ntouch {tmp_path}/ran\n").chmod(0o777)
    assert any(str(python) in told for told in levels(GOOD.format(hook=hook))["change"])
    assert not (tmp_path / "ran").exists()


def test_a_directory_like_tmp_is_as_good_as_its_entries(hook: Path, tmp_path: Path) -> None:
    (tmp_path / "opt").chmod(0o1777)
    assert levels(GOOD.format(hook=hook))["change"] == []


def test_where_a_link_leads_counts_too(hook: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    target = (tmp_path / "opt/python").rename(tmp_path / "open/python")
    (tmp_path / "opt/python").symlink_to(target)
    (tmp_path / "open").chmod(0o777)
    (told,) = levels(GOOD.format(hook=hook))["change"]
    assert f"can change {tmp_path}/open" in told
