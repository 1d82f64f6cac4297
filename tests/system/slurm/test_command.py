# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurm_health.records.errors import (
    SlurmCommandError,
    SlurmCommandMissing,
    SlurmTimeoutError,
)
from slurm_health.system.slurm.command import clean_environ, run
from tests.support.supervised import eventually, write_executable

ENVIRON = dict(os.environ)


def test_a_failure_tells_command_code_and_words() -> None:
    with pytest.raises(SlurmCommandError, match="failed with code 3: it broke") as caught:
        run(["sh", "-c", "echo it broke >&2; exit 3"], environ=ENVIRON)

    assert caught.value.returncode == 3
    assert caught.value.stderr == "it broke\n"


def test_a_command_that_is_not_installed_is_named() -> None:
    with pytest.raises(SlurmCommandMissing, match="no-such-command not found on PATH"):
        run(["no-such-command"], environ=ENVIRON)


def test_the_path_that_counts_is_the_one_in_the_given_environment(tmp_path: Path) -> None:
    write_executable(tmp_path / "scontrol", "#!/bin/sh\necho mine\n")

    assert run(["scontrol"], environ={"PATH": f"{tmp_path}:/bin:/usr/bin"}) == "mine\n"


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    began = time.monotonic()

    with pytest.raises(SlurmTimeoutError, match=r"did not answer within 0\.3 s"):
        run(
            ["sh", "-c", f"trap '' TERM; sleep 100 & echo $! > {pid_file}; wait"],
            environ=ENVIRON,
            deadline_s=0.3,
        )

    assert time.monotonic() - began < 60
    pid = int(pid_file.read_text())
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the child's end")


def test_a_child_left_behind_by_a_command_does_not_stay(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    run(["sh", "-c", f"sleep 100 >&- 2>&- & echo $! > {pid_file}"], environ=ENVIRON)

    pid = int(pid_file.read_text())
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "the child's end")


def test_text_that_is_not_utf_8_is_no_reason_to_fail() -> None:
    assert run(["printf", r"\377"], environ=ENVIRON) == "\ufffd"


def test_what_the_surrounding_job_or_its_user_set_does_not_reach_slurms_commands() -> None:
    surrounding = {
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS_PER_NODE": "8",
        "SBATCH_EXCLUDE": "n1",
        "SALLOC_X": "",
        "SRUN_DEBUG": "1",
        "SLURMD_NODENAME": "n1",
        "PMI_RANK": "0",
        "PMIX_RANK": "0",
        "SQUEUE_STATES": "PENDING",
        "SCANCEL_INTERACTIVE": "1",
        "SCONTROL_FUTURE": "1",
        "SACCT_FORMAT": "jobid",
        "SINFO_PARTITION": "main",
        "SLURM_CONF": "/etc/slurm.conf",
        "PATH": "/bin",
        "SLURMLIKE": "mine",
    }

    assert clean_environ(surrounding) == {
        "SLURM_CONF": "/etc/slurm.conf",
        "PATH": "/bin",
        "SLURMLIKE": "mine",
    }
