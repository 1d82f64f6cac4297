# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check` inside a job where Slurm's own commands are missing."""

from __future__ import annotations

from pathlib import Path

from tests.support.command_line import slurm_health


def test_without_srun_the_error_says_where_to_find_it(tmp_path: Path) -> None:
    environ = {
        "PATH": str(tmp_path),
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_CLUSTER_NAME": "lab",
        "SLURMD_NODENAME": "n1",
    }

    done = slurm_health("check", f"--journal={tmp_path}", environ=environ)

    assert done.code == 4
    assert "srun not found on PATH" in done.stderr
