# SPDX-License-Identifier: Apache-2.0
"""What is said of real processes that end by mistakes and crashes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_health.records.script_records import Diagnosed
from slurm_health.training.diagnosis.chain import InferenceChain
from slurm_health.training.diagnosis.collected import Collected, ScriptEnd
from slurm_health.training.diagnosis.diagnostician import Diagnostician, observe_failure
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.training_log import read_log

CRASH = "import ctypes; ctypes.string_at(0)"
BIND_TWICE = """
import socket
one, two = socket.socket(), socket.socket()
one.bind(("127.0.0.1", 0))
one.listen()
two.bind(one.getsockname())
"""
LOAD_OTHER = """
import pathlib, torch
file = pathlib.Path(__file__).with_name("last.pt")
file.write_text("version https://git-lfs.github.com/spec/v1")
torch.load(file)
"""
CLIP_INFINITE = """
import torch
w = torch.ones(2, requires_grad=True)
(w / 0).sum().backward()
torch.nn.utils.clip_grad_norm_([w], 1.0, error_if_nonfinite=True)
"""
NOBODY = 65534


def ended(
    directory: Path, program: str, *, shell: str = "exec", user: int | None = None
) -> tuple[str, int]:
    """Run a program from a file, as a batch script would; return its output and exit status."""
    script = directory / "train.py"
    script.write_text(program + "\n")
    directory.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", f"{shell} {sys.executable} -u {script}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd="/",
        user=user,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.stdout, done.returncode


def told(output: str, status: int, nodes: tuple[str, ...] = ("n1",)) -> Diagnosed:
    end = ScriptEnd(
        exit_code=status if status >= 0 else 128 - status, signal=max(0, -status), nodes=nodes
    )
    data = Collected([end, read_log([("out", output)])])
    found = Diagnostician(observe_failure, InferenceChain(OPERATORS)).diagnose(data).diagnosed
    assert found is not None
    assert found.accused == []
    return found


@pytest.mark.parametrize(
    ("program", "cause", "attribution", "where"),
    [
        ("open('configs/base.yaml')", "file-not-found", "user error", "train.py:1"),
        ("open('/')", "file-not-found", "user error", "train.py:1"),
        ("import no_such_module", "module-not-found", "user error", "train.py:1"),
        ("import os\nos.no_such", "program-error", "user error", "train.py:2"),
        ("raise RuntimeError('no batches left')", "program-error", "user error", "train.py:1"),
        ("raise RuntimeError('CUDA is slow today')", "rank-failed", "undecided", "RuntimeError"),
        ("bytearray(1 << 60)", "host-out-of-memory", "user error", ""),
        (BIND_TWICE, "port-in-use", "transient", ""),
        ("import sys\nsys.exit('KeyError: lr')", "program-error", "user error", ""),
    ],
)
def test_a_program_that_ends_by_an_exception_is_told_with_its_line(
    tmp_path: Path, program: str, cause: str, attribution: str, where: str
) -> None:
    found = told(*ended(tmp_path, program))
    assert (found.cause, found.attribution) == (cause, attribution)
    assert where in found.description
    assert found.nodes == []


@pytest.mark.root
def test_a_file_that_the_user_may_not_read_is_told_as_that(tmp_path: Path) -> None:
    closed = tmp_path / "data"
    closed.write_text("")
    closed.chmod(0)
    for each in (tmp_path, *tmp_path.parents[:-2]):
        each.chmod(each.stat().st_mode | 0o011)
    found = told(*ended(tmp_path, f"open({str(closed)!r})", user=NOBODY))
    assert (found.cause, found.attribution) == ("permission-denied", "user error")


def test_of_several_nodes_one_may_lack_the_file_and_nothing_is_decided(tmp_path: Path) -> None:
    found = told(*ended(tmp_path, "open('configs/base.yaml')"), nodes=("n1", "n2"))
    assert (found.cause, found.attribution) == ("file-not-found", "undecided")
    assert "whether this rank alone uses it" in found.advice


@pytest.mark.parametrize("shell", ["exec", ""])
def test_a_segmentation_fault_is_told_whether_a_shell_stands_between_or_not(
    tmp_path: Path, shell: str
) -> None:
    output, status = ended(tmp_path, CRASH, shell=f"ulimit -c 0; {shell}")
    found = told(output, status)
    assert found.cause == "crashed"
    assert "SIGSEGV, a segmentation fault" in found.description


def test_a_segmentation_fault_by_the_shells_exit_code_is_one() -> None:
    found = told("bash: line 1: 23 Segmentation fault (core dumped) python train.py\n", 139)
    assert found.cause == "crashed"
    assert any("Segmentation fault (core dumped)" in line for line in found.evidence)


def test_an_exception_that_was_dealt_with_does_not_explain_a_later_signal(tmp_path: Path) -> None:
    program = "import os\nprint('RuntimeError: read again')\nos.kill(os.getpid(), 15)"
    assert told(*ended(tmp_path, program)).cause != "rank-failed"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("program", "cause"),
    [
        (LOAD_OTHER, "checkpoint-broken"),
        (CLIP_INFINITE, "not-a-number"),
    ],
)
def test_what_torch_says_of_a_broken_checkpoint_or_gradient_is_understood(
    tmp_path: Path, program: str, cause: str
) -> None:
    found = told(*ended(tmp_path, program))
    assert (found.cause, found.attribution) == (cause, "user error")
