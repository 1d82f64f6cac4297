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


def test_the_path_of_the_environment_counts_and_any_text_is_an_answer(tmp_path: Path) -> None:
    with pytest.raises(SlurmCommandMissing, match="no-such-command not found on PATH"):
        run(["no-such-command"], environ=ENVIRON)
    write_executable(tmp_path / "scontrol", "#!/bin/sh\nprintf 'mine \\377'\n")
    assert run(["scontrol"], environ={"PATH": f"{tmp_path}:/bin:/usr/bin"}) == "mine \ufffd"


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

    # Nor does a child stay that a command leaves behind.
    run(["sh", "-c", f"sleep 100 >&- 2>&- & echo $! > {pid_file}"], environ=ENVIRON)
    left = int(pid_file.read_text())
    eventually(lambda: not Path(f"/proc/{left}").exists(), "the child's end")


def test_what_the_surrounding_job_or_its_user_set_does_not_reach_slurms_commands() -> None:
    set_by_others = (
        "SLURM_JOB_ID SLURM_NTASKS_PER_NODE SBATCH_EXCLUDE SALLOC_X SRUN_DEBUG SLURMD_NODENAME"
        " PMI_RANK PMIX_RANK SQUEUE_STATES SCANCEL_INTERACTIVE SCONTROL_FUTURE SACCT_FORMAT"
        " SINFO_PARTITION"
    )
    kept = {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "SLURMLIKE": "mine"}

    assert clean_environ({**dict.fromkeys(set_by_others.split(), "1"), **kept}) == kept
