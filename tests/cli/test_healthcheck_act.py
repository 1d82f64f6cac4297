# SPDX-License-Identifier: Apache-2.0
"""`slurm-health healthcheck --act`: what it goes with, and how it ends."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from slurm_health.cli import hooks
from slurm_health.node.hooks.healthcheck import LOCK
from tests.cli.test_hooks import call
from tests.support.hooked_node import Node
from tests.support.sites import write_site

pytestmark = pytest.mark.usefixtures("on_n3")


def test_results_of_a_health_check_that_acts_can_be_read_by_a_program(node: Node) -> None:
    node.more = "[checks.bad]\ncheck='cpus'\nmin_online=100000\n"
    result = call(node, "healthcheck", "--act", "--json")
    assert result.return_value == 1
    found = {each["name"]: each["finding"]["status"] for each in json.loads(result.stdout)}
    assert found["bad"] == "node_fault"
    assert node.state == "IDLE+DRAIN"
    assert "drain" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--explain",), "--explain runs nothing: leave out --act"),
        (("--context", "retest"), "leave out --context retest"),
    ],
)
def test_what_does_not_act_does_not_go_with_act(
    node: Node, words: tuple[str, ...], said: str
) -> None:
    node.more = "[checks.bad]\ncheck='cpus'\nmin_online=100000\n"
    with pytest.raises(click.UsageError, match=said):
        call(node, "healthcheck", "--act", *words)
    assert node.state == "IDLE"


def test_a_health_check_that_acts_while_another_is_at_work_ends_with_3(node: Node) -> None:
    node.site.state.mkdir(mode=0o700, parents=True)
    with (node.site.state / LOCK).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = call(node, "healthcheck", "--act", "--json")
    assert (result.return_value, result.stdout) == (3, "")
    assert "nothing is checked: an earlier health check is still running" in result.stderr


def test_a_health_check_that_acts_ends_with_3_where_something_cannot_be_measured(
    tmp_path: Path,
) -> None:
    text = f"[hooks]\nstate='{tmp_path}/state'\n[checks.gone]\ncheck='command'\nargv=['/nowhere']\n"
    words = ["--act", "--config", str(write_site(tmp_path / "etc", text))]
    assert CliRunner().invoke(hooks.healthcheck, words, standalone_mode=False).return_value == 3
