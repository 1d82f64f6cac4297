# SPDX-License-Identifier: Apache-2.0
"""A person's mistakes that are no Python exception: what programs wrote, and what is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_health.records.script_records import Diagnosed
from slurm_health.training.diagnosis.failed import of_surroundings
from slurm_health.training.diagnosis.failure import JobAtFailure, what_follows
from tests.support.ended_jobs import diagnosed_by_output

# As torchrun of two nodes wrote it, with lines of one in the traceback of the other.
NO_FILE = "python: can't open file '/home/alice/trian.py': [Errno 2] No such file or directory"


def diagnose(text: str, code: int = 1, nodes: int = 2) -> Diagnosed:
    return diagnosed_by_output(text, code, ("n1", "n2")[:nodes])


def next_of(found: Diagnosed) -> str:
    return what_follows(found, JobAtFailure(batch_node="n1", nodes=("n1", "n2"), least=1)).kind


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
    found = diagnose(ran.stdout + ran.stderr, ran.returncode, nodes=1)

    assert (found.attribution, found.sureness) == ("user error", "certain")
    assert quoted in found.description


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("line 3: mpirun: command not found", "line 3: mpirun: command not found"),  # bash
        ("3: mpirun: not found", "line 3: mpirun: not found"),  # dash
    ],
)
@pytest.mark.parametrize("path", ["/tmp/slurm-health-2__pbe_o", "/var/spool/slurmd/job00012"])
def test_a_mistake_in_the_script_is_told_by_its_line_and_not_by_the_path_of_a_copy(
    path: str, said: str, told: str
) -> None:
    words = f"{path}/slurm_script: {said}"

    found = diagnose(f"{words}\n", 127, nodes=1)

    assert found.description.endswith(f" or may not be run: {told}")
    assert words in found.evidence


def test_a_file_that_one_node_alone_lacks_is_not_decided_and_that_node_is_named() -> None:
    text = f"{NO_FILE}\nsrun: error: n2: task 1: Exited with exit code 2\n"
    found = diagnose(text, 2)

    assert (found.attribution, found.nodes, found.accused) == ("undecided", ["n2"], [])
    assert "check whether n2 has" in found.advice
    assert next_of(found) == "check"


def test_beside_an_exception_neither_progress_nor_torchruns_summary_is_evidence() -> None:
    text = (
        "step 9\nstep 10\n[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/home/alice/train.py", line 10, in <module>\n'
        "[rank1]: RuntimeError: bad batch 17\n"
        "train.py FAILED\nFailures:\n  <NO_OTHER_FAILURES>\n"
        "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 0)\n"
    )
    found = diagnose(text)

    assert found.attribution == "undecided"
    assert found.evidence == ["rank 1: RuntimeError: bad batch 17 (train.py:10)"]


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        ("RuntimeError: no key 'lr' in /home/rebecca/config.yaml", False),
        ("ValueError: unbalanced quotation mark", False),
        ("RuntimeError: uncorrectable ECC error", True),
        ("OSError: [Errno 122] Disk quota exceeded", True),
        ("RuntimeError: NVRM reports Xid 79", True),
    ],
)
def test_what_machines_do_is_told_by_whole_words_and_not_by_parts_of_a_name(
    error: str, is_one: bool
) -> None:
    assert of_surroundings(error) is is_one
