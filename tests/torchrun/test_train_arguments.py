# SPDX-License-Identifier: Apache-2.0
"""Command lines as torchrun's own parser reads them, with our options among its own."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_health.preflight.options import FOR_RUN
from slurm_health.records.errors import ConfigError
from slurm_health.torchrun.in_job import arguments
from slurm_health.torchrun.in_job.arguments import (
    Option,
    add_options,
    read,
    suggestion,
    wrong_processes,
)
from slurm_health.torchrun.train import ParserEnded
from slurm_health.torchrun.train import read as read_with_interpreter
from tests.support.command_line import slurm_health
from tests.support.unshared import TORCHRUN_READING, played_python

pytestmark = pytest.mark.torch


def parsed(*argv: str) -> dict[str, Any]:
    from torch.distributed.run import get_args_parser

    ours = [Option(e.name, e.metavar, e.help) for e in FOR_RUN]
    return read(list(argv), get_args_parser(), ours)


@pytest.mark.parametrize("words", [(), ("--",)], ids=["nothing", "--"])
def test_a_command_line_without_a_script_is_a_misuse(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    python = played_python(tmp_path, trains=False)
    done = slurm_health("run", f"--python={python}", *words)
    assert done.code == 2
    assert "error: no SCRIPT to train with: it follows the options" in done.stderr
    assert "training_script" not in done.stderr


def test_a_script_that_is_not_there_is_refused_before_anything_is_checked(tmp_path: Path) -> None:
    python = f"--python={played_python(tmp_path, trains=False)}"
    missing = tmp_path / "trian.py"

    done = slurm_health("run", python, "--network-check", str(missing))

    assert done.code == 1
    assert done.stderr.startswith(f"slurm-health: {missing}: there is no such script in ")


def test_a_number_of_processes_that_torchrun_cannot_understand_is_refused() -> None:
    assert wrong_processes("x").startswith("--nproc-per-node: ")
    assert wrong_processes("2") == wrong_processes("cpu") == ""


def test_of_a_mistyped_option_it_is_said_what_may_have_been_meant() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, [Option("network-check", "", "")])

    said = suggestion("unrecognized arguments: --netwrok-check --nothing-like-it=3", parser)

    assert said == "; did you mean --network-check?"


CHECK = {"network-check": True}


@pytest.mark.parametrize(
    ("argv", "options", "program", "own", "given"),
    [
        ("train.py", "", "train.py", {}, {}),
        ("--network-check --standalone train.py", "--standalone", "train.py", CHECK, {}),
        ("--nproc-per-node 2 --network_check t.py", "--nproc-per-node 2", "t.py", CHECK, {}),
        ("--journal /j -t 3 train.py", "-t 3", "train.py", {"journal": "/j"}, {}),
        (
            "--straggler_det --role a -m train.py",
            "--role a -m",
            "train.py",
            {"straggler-detection": True},
            {},
        ),
        # What follows the script is its own.
        (
            "train.py --network-check -- --journal",
            "",
            "train.py --network-check -- --journal",
            {},
            {},
        ),
        ("--nnodes=2 -- train.py -x", "--nnodes=2", "-- train.py -x", {}, {"nnodes": "2"}),
        ("--nnodes 2 2 2", "--nnodes 2", "2 2", {}, {"nnodes": "2"}),
        (
            "--rdzv_endpoint n1:5 --nno=2:3 --node_rank=0 t.py",
            "--rdzv_endpoint n1:5 --nno=2:3 --node_rank=0",
            "t.py",
            {},
            {"nnodes": "2:3", "rdzv_endpoint": "n1:5", "node_rank": "0"},
        ),
    ],
)
def test_our_options_are_taken_out_and_torchruns_kept_as_they_were_written(
    argv: str, options: str, program: str, own: dict[str, object], given: dict[str, str]
) -> None:
    found = parsed(*argv.split())
    assert found["options"] == options.split()
    assert found["program"] == program.split()
    assert found["own"] == own
    assert found["given"] == given
    assert found["standalone"] == ("--standalone" in argv)


@pytest.mark.parametrize("argv", ["--nnods=2 train.py", "--network-chekc train.py", ""])
def test_what_torchrun_does_not_know_it_refuses_itself(
    argv: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        parsed(*argv.split())
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert ("unrecognized arguments" in said) or ("required: training_script" in said)


@pytest.mark.slow
def test_variables_of_torchruns_own_count_as_given(tmp_path: Path) -> None:
    environ = {**os.environ, "PET_NNODES": "2:4", "PET_STANDALONE": "0"}
    # `--python` is the script's here, although it looks like ours.
    argv = ["--network-check", __file__, "--python", "no-such-python"]
    python, found = read_with_interpreter(argv, environ)
    assert found.given == {"nnodes": "2:4"}
    assert found.own == {"network-check": True}
    assert found.program[1:] == ["--python", "no-such-python"]
    assert Path(python).is_absolute()


@pytest.mark.slow
def test_the_interpreter_is_the_one_that_is_named() -> None:
    python, found = read_with_interpreter(["--python", sys.executable, __file__], os.environ)
    assert python == sys.executable == found.text("python")


def test_our_options_are_read_and_checked(tmp_path: Path) -> None:
    python = f"--python={played_python(tmp_path, trains=False)}"
    argv = [python, "--secret_file=key", "--network-check", __file__]
    _, found = read_with_interpreter(argv, os.environ)
    assert found.own["secret-file"] == str(Path("key").absolute())
    with pytest.raises(ConfigError, match="--monitor: 'kill' is not one of report"):
        read_with_interpreter([python, "--monitor=kill", __file__], os.environ)


def test_an_interpreter_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such executable"):
        read_with_interpreter(["--python=/no/python", __file__], os.environ)


def test_an_interpreter_without_torch_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ParserEnded) as ended:
        read_with_interpreter([f"--python={bare}", __file__], {"PATH": os.environ["PATH"]})
    assert ended.value.exit_code == 1
    assert "cannot load torchrun: No module named 'torch'" in capfd.readouterr().err


def test_ctrl_c_while_torch_is_loaded_shows_none_of_our_code(tmp_path: Path) -> None:
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    for each in (package, package.parent):
        (each / "__init__.py").touch()
    (package / "run.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    reader = Path(arguments.__file__)
    process = subprocess.Popen(
        [sys.executable, str(reader), "1", "[]", "train.py"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"loading\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (-signal.SIGINT, b"")


@pytest.mark.parametrize("argv", [f"--nnodes=2:3 -t 3 --journal=/j {__file__} -x", "--stand -m x"])
def test_read_without_torch_a_command_line_says_the_same(argv: str) -> None:
    ours = [(e.name, e.metavar, e.help) for e in FOR_RUN]
    reader = [str(TORCHRUN_READING), arguments.__file__, "1", json.dumps(ours)]
    done = subprocess.run(
        [sys.executable, *reader, *argv.split()], capture_output=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == parsed(*argv.split())
