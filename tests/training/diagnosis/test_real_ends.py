# SPDX-License-Identifier: Apache-2.0
"""What is said of real processes that end by mistakes and crashes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_health.records.script_records import Diagnosed
from tests.support.ended_jobs import diagnosed_by_output
from tests.support.rows import rows

LOAD_CUT_SHORT = """
import pathlib, torch
file = pathlib.Path(__file__).with_name("last.pt")
torch.save({"weights": torch.zeros(100_000)}, file)
file.write_bytes(file.read_bytes()[:SIZE])
torch.load(file)
"""
SEEK = "import os\nos.lseek(os.open(file, os.O_RDONLY), -1, os.SEEK_SET)"
SIZES = ("0", "100", "5_000", "100_000")  # of which torch says different things


def ended(directory: Path, program: str) -> tuple[str, int]:
    """Run a program from a file, as a batch script would; return its output and exit status."""
    script = directory / "train.py"
    script.write_text(program + "\n")
    done = subprocess.run(
        ["bash", "-c", f"exec {sys.executable} -u {script}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.stdout, done.returncode


def told(output: str, status: int, nodes: tuple[str, ...] = ("n1",)) -> Diagnosed:
    found = diagnosed_by_output(output, status, nodes)
    assert found.accused == []
    return found


@rows
def test_a_program_that_ends_by_an_exception_is_told_with_its_line(
    tmp_path: Path, program: str, cause: str, attribution: str, where: str
) -> None:
    found = told(*ended(tmp_path, program))
    assert (found.cause, found.attribution) == (cause, attribution)
    assert where in found.description
    assert found.nodes == []


@pytest.mark.slow
@pytest.mark.torch
@rows
def test_what_torch_says_of_a_checkpoint_a_gradient_a_loader_or_a_device_is_understood(
    tmp_path: Path, program: str, cause: str
) -> None:
    found = told(*ended(tmp_path, program))
    assert (found.cause, found.attribution) == (cause, "user error")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("size", SIZES)
def test_a_checkpoint_that_was_cut_short_is_broken(tmp_path: Path, size: str) -> None:
    found = told(*ended(tmp_path, LOAD_CUT_SHORT.replace("SIZE", size)))
    assert (found.cause, found.attribution) == ("checkpoint-broken", "user error")


@pytest.mark.torch
def test_an_invalid_argument_elsewhere_than_in_torch_load_is_no_broken_checkpoint(
    tmp_path: Path,
) -> None:
    program = f"{LOAD_CUT_SHORT.replace('SIZE', '-1').replace('torch.load(file)', '')}{SEEK}"
    found = told(*ended(tmp_path, program))
    assert found.cause == "rank-failed"
    assert any("Invalid argument" in line for line in found.evidence)


# --- mistakes that are no Python exception -------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "quoted"),
    [
        ("if true then\necho 1\n", "syntax error"),
        ("echo begins\ntrochrun train.py\n", "trochrun: command not found"),
        (f"{sys.executable} trian.py\n", "can't open file"),
        (f"{sys.executable} -m trochrun\n", "No module named trochrun"),
        (f"{sys.executable} wrong.py\n", "SyntaxError"),
        (f"{sys.executable} args.py --lrr 3\n", "unrecognized arguments: --lrr 3"),
    ],
)
def test_what_a_real_shell_and_python_cannot_run_is_the_users_mistake(
    tmp_path: Path, script: str, quoted: str
) -> None:
    (tmp_path / "train.sh").write_text(script)
    (tmp_path / "wrong.py").write_text("print('begins'\n")
    (tmp_path / "args.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    ran = subprocess.run(
        ["bash", "train.sh"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    found = told(ran.stdout + ran.stderr, ran.returncode)

    assert (found.attribution, found.sureness) == ("user error", "certain")
    assert quoted in found.description
