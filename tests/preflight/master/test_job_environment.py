# SPDX-License-Identifier: Apache-2.0
"""The environment that a file of the user's makes, read by a real bash."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from slurm_health.preflight.master.job_environment import environ_after
from slurm_health.records.errors import ConfigError
from tests.support.rows import rows

BEFORE = {"PATH": os.environ["PATH"], "HOME": "/home/alice", "PWD": "/job", "GONE": "soon"}


def after(
    directory: Path, text: str, environ: Mapping[str, str] = BEFORE, name: str = "env.sh"
) -> Mapping[str, str]:
    file = directory / name
    file.write_text(text)
    return environ_after(str(file), environ)


def test_what_the_file_exports_is_added_and_what_it_unsets_is_gone(tmp_path: Path) -> None:
    found = after(tmp_path, "export NCCL_SOCKET_IFNAME=ib0\nunset GONE\nunexported=1\n")

    rest = {name: value for name, value in BEFORE.items() if name != "GONE"}
    assert found == {**rest, "NCCL_SOCKET_IFNAME": "ib0"}


def test_functions_that_were_exported_can_be_called_as_module_is(tmp_path: Path) -> None:
    module = {"BASH_FUNC_module%%": "() {  export LOADED=$2\n}"}

    found = after(tmp_path, "module load nccl\n", {**BEFORE, **module})

    assert found["LOADED"] == "nccl"
    assert found["BASH_FUNC_module%%"].startswith("() {")


def test_values_keep_their_line_ends_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "env.sh"
    file.write_bytes(b"export LINES='a\nB=b' BYTES=$'\\xff' EMPTY=\n")

    found = environ_after(str(file), BEFORE)

    assert (found["LINES"], os.fsencode(found["BYTES"]), found["EMPTY"]) == ("a\nB=b", b"\xff", "")
    assert "B" not in found


@rows
def test_only_the_environment_of_the_file_counts(tmp_path: Path, text: str) -> None:
    found = after(tmp_path, text, name="a file's.sh")

    assert (found["X"], found["PWD"], "NOISE" in found) == ("1", "/job", False)


def test_what_the_shells_own_start_prints_is_no_variable(tmp_path: Path) -> None:
    start = tmp_path / "start.sh"
    start.write_text("echo NOISE=1\n")

    assert "NOISE" not in "".join(after(tmp_path, "", {**BEFORE, "BASH_ENV": str(start)}))


@rows
def test_a_file_that_fails_is_an_error_and_its_words_are_kept_out_of_it(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        after(tmp_path, f"set -x; export TOKEN=hidden; echo hidden\n{text}\n")

    assert str(caught.value).startswith(f"--setup: {tmp_path}/env.sh: {said}")
    assert "hidden" not in str(caught.value)
    assert str(caught.value).count("env.sh") == 1


def test_a_file_that_is_not_there_or_cannot_be_sourced_is_named_with_the_reason(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="cannot be read on this node: No such file"):
        environ_after(str(tmp_path / "none"), BEFORE)
    with pytest.raises(ConfigError, match="cannot be read on this node: Is a directory"):
        environ_after(str(tmp_path), BEFORE)
    with pytest.raises(ConfigError, match="needs bash, which is not on PATH"):
        after(tmp_path, "", {"PATH": str(tmp_path)})
