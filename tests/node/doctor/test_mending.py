# SPDX-License-Identifier: Apache-2.0
"""What doctor says of the steps that mend a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.node.doctor import mending
from tests.node.doctor.conftest import by_level
from tests.support.sites import load_site


@pytest.mark.parametrize(
    ("settings", "config", "level", "said"),
    [
        ("steps = ['reboot']", {"A": "b"}, "change", "slurm.conf has no RebootProgram"),
        ("steps = ['reboot']", {"RebootProgram": "/sbin/reboot"}, "fine", "(dry run): reboot"),
        ("steps = ['reset']\nreset = ['/nowhere/smi']", {}, "change", "/nowhere/smi is not on"),
        ("steps = ['ticket']", {}, "look", "no one is notified"),
        ("", {}, "look", "mend.steps is empty"),
        (
            "steps = ['deep_test']\ndeep_test = ['/bin/true']",
            {"DisableRootJobs": "YES"},
            "change",
            "root's test cannot be submitted",
        ),
    ],
)
def test_what_keeps_a_step_from_being_taken_is_named(
    tmp_path: Path, settings: str, config: dict[str, str], level: str, said: str
) -> None:
    text = f"[breaker]\ndirectory = '{tmp_path}'\n[mend]\nenabled = true\n{settings}\n"

    found = by_level(mending.advise(load_site(tmp_path / "etc", text), config))
    assert any(said in each for each in found[level]), found
    assert mending.advise(load_site(tmp_path / "off", ""), config) == []
