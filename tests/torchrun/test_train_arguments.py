# SPDX-License-Identifier: Apache-2.0
"""torchrun's command lines, with our options among its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_health.records.errors import ConfigError, UsageError
from slurm_health.torchrun import train
from slurm_health.torchrun.arguments import Arguments
from slurm_health.torchrun.place import TaskPlace
from slurm_health.torchrun.starts import Training
from slurm_health.torchrun.train import read
from tests.support.rows import rows

PYTHON = f"--python={sys.executable}"


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the scripts of these tests are."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "t.py", "2"):
        Path(name).touch()


def parsed(*argv: str, **environ: str) -> Arguments:
    found = read([PYTHON, *argv], environ)[1]
    del found.own["python"]
    return found


@pytest.mark.parametrize("words", [(), ("--",), ("--nnodes=2",)])
def test_a_command_line_without_a_script_is_a_misuse(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="no SCRIPT to train with: it follows the options"):
        parsed(*words)


def test_a_script_that_is_not_there_is_refused_before_anything_is_checked() -> None:
    with pytest.raises(ConfigError, match="there is no such script in "):
        parsed("--network-check", "trian.py")
    assert parsed("--no-python", "hostname").program == ["hostname"]


@rows
def test_our_options_are_taken_out_and_torchruns_kept_as_they_were_written(
    argv: str, options: str, program: str, own: dict[str, object], given: dict[str, str]
) -> None:
    found = parsed(*argv.split())
    assert found.options == options.split()
    assert found.program == program.split()
    assert found.own == own
    assert found.given == given
    assert found.standalone == ("--standalone" in argv)


def test_variables_of_torchruns_own_count_as_given() -> None:
    found = parsed("train.py", PET_NNODES="2:4", PET_STANDALONE="0")
    assert (found.given, found.standalone) == ({"nnodes": "2:4"}, False)
    assert parsed("--nnodes=3", "train.py", PET_NNODES="2:4").given == {"nnodes": "3"}
    assert parsed("train.py", PET_STANDALONE="1").standalone


def test_our_options_are_checked() -> None:
    assert parsed("--setup=key", "train.py").own["setup"] == str(Path("key").absolute())
    with pytest.raises(ConfigError, match="--monitor: 'kill' is not one of report"):
        parsed("--monitor=kill", "train.py")
    with pytest.raises(ConfigError, match="no such executable"):
        read(["--python=/no/python", "train.py"], os.environ)


@pytest.mark.torch
def test_every_flag_of_torchrun_is_known() -> None:
    from torch.distributed.run import get_args_parser

    flags = {
        word.lstrip("-").replace("_", "-")
        for action in get_args_parser()._actions
        for word in action.option_strings
        if action.nargs == 0
    }
    assert flags - {"h", "help"} == train._FLAGS


@pytest.mark.torch
def test_an_interpreter_without_torch_is_named(tmp_path: Path) -> None:
    torchrun = Path(train.__file__).with_name("quiet_torchrun.py")
    command = [sys.executable, "-S", str(torchrun), "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert f"--python: {sys.executable}: cannot load torchrun: No module" in done.stderr


def test_more_nodes_than_there_are_cannot_be_had() -> None:
    place = TaskPlace(nodes=("n1", "n2"), node="n1", start="7.0.1", job_id=7)
    arguments = parsed("--nnodes=3", "train.py")
    with pytest.raises(UsageError, match="--nnodes=3: there are fewer nodes here: 2"):
        Training("python3", arguments, {}, place)
