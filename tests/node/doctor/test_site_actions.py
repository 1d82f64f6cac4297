# SPDX-License-Identifier: Apache-2.0
"""What doctor says of the steps that repair a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.node.doctor import machine
from tests.node.doctor.conftest import by_level
from tests.support.sites import load_site


@pytest.mark.parametrize(
    ("settings", "config", "level", "said"),
    [
        ("steps = ['reboot']", {"A": "b"}, "change", "slurm.conf has no RebootProgram"),
        ("steps = ['reboot']", {"RebootProgram": "/sbin/reboot"}, "fine", "(dry run): reboot"),
        ("steps = ['reset']\nreset = ['/nowhere/smi']", {}, "change", "/nowhere/smi is not on"),
        ("steps = ['administrator']", {}, "look", "no event is sent"),
        ("test = ['/nowhere/diag']", {}, "change", "repair.test: /nowhere/diag is not on"),
    ],
)
def test_what_keeps_a_step_from_being_taken_is_named(
    tmp_path: Path, settings: str, config: dict[str, str], level: str, said: str
) -> None:
    text = f"[breaker]\ndirectory = '{tmp_path}'\n[repair]\n{settings}\n"

    found = by_level(machine.advise_on_repair(load_site(tmp_path / "etc", text), config))
    assert any(said in each for each in found[level]), found
    assert machine.advise_on_repair(load_site(tmp_path / "off", ""), config) == []


@pytest.mark.root
@pytest.mark.parametrize(
    ("settings", "level", "said"),
    [
        ("command = ['/nowhere/ticket']", "change", "/nowhere/ticket is not on this node"),
        ("command = ['{loose}']", "change", "others than root can change"),
        ("command = ['/bin/cat']", "fine", "try: slurm-health doctor --test-notify"),
        ("urls = ['slack://token']", "look", "users can read"),
        ("urls = ['{open}']", "change", "closed to others"),
        ("urls = ['/nowhere/urls']", "change", "/nowhere/urls cannot be read"),
    ],
)
def test_what_keeps_events_from_arriving_or_shows_a_secret_is_named(
    tmp_path: Path, settings: str, level: str, said: str
) -> None:
    for name, mode in (("loose", 0o777), ("open", 0o644)):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(mode)
    text = settings.format(loose=tmp_path / "loose", open=tmp_path / "open")
    site = load_site(tmp_path / "etc", f"[notify]\n{text}\n")

    found = by_level(machine.advise_on_notify(site))
    assert any(said in each for each in found[level]), found
    assert machine.advise_on_notify(load_site(tmp_path / "off", "")) == []
