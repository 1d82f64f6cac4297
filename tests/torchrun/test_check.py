# SPDX-License-Identifier: Apache-2.0
"""The check of a training's nodes as its processes see it: the secret, and earlier checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.records.errors import ConfigError, ExitCode, JournalError
from slurm_health.torchrun.arguments import Arguments
from slurm_health.torchrun.check import KEY_VARIABLE, checked, read_secret, without_secret
from slurm_health.torchrun.earlier_check import measured_in
from slurm_health.torchrun.node_choice import Bounds
from slurm_health.torchrun.step import Start
from tests.torchrun.test_earlier_check import WHOLE, lay, own, place

SECRET = b"correct horse battery staple"


def taken_part(root: Path, node: str, least: int = 1) -> Start | int:
    """Take part as this node in a check that an earlier one stands for."""
    words: dict[str, str | int | bool] = {"network-check": True, "journal": str(root)}
    arguments = Arguments(options=[], program=["train.py"], given={}, own=words)
    return checked(place(node), Bounds(least=least, most=2), arguments, "python3", {})


def test_all_tasks_know_whom_the_earlier_verdict_lets_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = lay(tmp_path, *WHOLE)

    led = taken_part(tmp_path, "n1")

    assert isinstance(led, Start)
    assert led.nodes == ("n1",)
    assert led.left_out == {"n2": "faulty, dead"}
    assert "ago: n2 faulty" in capsys.readouterr().err
    assert taken_part(tmp_path, "n2") == ExitCode.HEALTHY
    assert "n2 is LEFT OUT: faulty, dead; training goes on" in capsys.readouterr().err
    assert measured_in(own(tmp_path)) == directory
    assert measured_in(directory) == directory


def test_with_too_few_nodes_left_all_tasks_end_and_the_first_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lay(tmp_path, *WHOLE)
    assert [taken_part(tmp_path, node, 2) for node in ("n1", "n2")] == [ExitCode.BAD_NODES] * 2
    assert capsys.readouterr().err.count("training does NOT start: n2 is faulty: dead") == 1


def test_a_start_is_made_only_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lay(tmp_path, *WHOLE)
    taken_part(tmp_path, "n1")
    with pytest.raises(JournalError, match="earlier start"):
        taken_part(tmp_path, "n1")
    # Where all nodes are needed, they train unchecked.
    assert taken_part(tmp_path, "n1", 2) == Start(nodes=("n1", "n2"))
    assert "n1: UNCHECKED: journal" in capsys.readouterr().err


def test_a_secret_comes_from_a_file_or_else_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    environ = {KEY_VARIABLE: "another one that is long enough"}
    assert read_secret(str(file), environ) == SECRET
    assert read_secret(None, environ) == b"another one that is long enough"
    assert read_secret(None, {}) == b""
    assert without_secret({**environ, "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("text", ["", "short", " " * 40])
def test_what_is_too_short_to_be_a_secret_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="openssl rand -hex 32"):
        read_secret(None, {KEY_VARIABLE: text})


@pytest.mark.parametrize(
    ("mode", "match"), [(None, "No such file"), (0o644, "chmod 600"), (0o620, "chmod 600")]
)
def test_a_secret_file_that_others_may_use_or_nobody_can_is_refused(
    tmp_path: Path, mode: int | None, match: str
) -> None:
    file = tmp_path / "secret"
    if mode is not None:
        file.write_bytes(SECRET)
        file.chmod(mode)
    with pytest.raises(ConfigError, match=match):
        read_secret(str(file), {})
