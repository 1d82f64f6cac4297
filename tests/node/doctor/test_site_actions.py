# SPDX-License-Identifier: Apache-2.0
"""What doctor says of the steps that mend a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.node.doctor import site_actions
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

    found = by_level(site_actions.advise_on_mending(load_site(tmp_path / "etc", text), config))
    assert any(said in each for each in found[level]), found
    assert site_actions.advise_on_mending(load_site(tmp_path / "off", ""), config) == []


@pytest.mark.root
@pytest.mark.parametrize(
    ("target", "level", "said"),
    [
        ("command = ['/nowhere/ticket']", "change", "/nowhere/ticket cannot be run here"),
        ("command = ['/bin/cat']", "fine", "ops: notified of what happens to nodes"),
        ("url = 'https://chat/x'\nformat = 'slack'", "look", "users can read this file"),
        ("url = 'http://far/x'\nsecret_file = '{secret}'", "look", "crosses the network"),
        ("url_file = '{open}'", "change", "closed to others"),
        ("url_file = '/nowhere/url'", "change", "/nowhere/url cannot be read"),
    ],
)
def test_a_target_that_cannot_be_told_or_tells_too_much_is_named(
    tmp_path: Path, target: str, level: str, said: str
) -> None:
    for name, mode in (("secret", 0o600), ("open", 0o644)):
        (tmp_path / name).write_text("https://chat/x\n")
        (tmp_path / name).chmod(mode)
    (tmp_path / "shared").mkdir(mode=0o755)
    text = target.format(secret=tmp_path / "secret", open=tmp_path / "open")
    site = load_site(
        tmp_path / "etc",
        f"[breaker]\ndirectory = '{tmp_path}/shared'\n[notify.targets.ops]\n{text}\n",
    )

    found = by_level(site_actions.advise_on_notices(site))
    assert any(said in each for each in found[level]), found


def test_targets_without_a_shared_directory_are_told_nothing(tmp_path: Path) -> None:
    site = load_site(tmp_path, "[notify.targets.ops]\ncommand = ['/bin/cat']\n")

    assert "nodes have nowhere to queue events" in "".join(
        by_level(site_actions.advise_on_notices(site))["change"]
    )
    assert site_actions.advise_on_notices(load_site(tmp_path, "")) == []
