# SPDX-License-Identifier: Apache-2.0
"""`slurm-health sweep` where it can check nothing."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.command_line import slurm_health
from tests.support.fake_slurm import FakeSlurm


@pytest.mark.torch
def test_a_partition_that_is_too_small_to_check_is_an_error(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", ["n1", "n2", "n3"])
    slurm.set(partition_nodes="n[1-3]")
    journal = f"--journal={tmp_path / 'journal'}"

    done = slurm_health(
        "sweep", "-p", "main", journal, f"--python={sys.executable}", environ=slurm.environ()
    )

    assert done.code == 2
    assert "a sweep can never check main: it takes 3 nodes at a time" in done.stderr
    assert "salloc -p main -N 3 slurm-health check" in done.stderr
    assert not slurm.calls("sbatch")


def test_a_sweep_that_cannot_record_what_becomes_of_its_jobs_submits_none(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", [f"n{number}" for number in range(1, 9)])
    slurm.set(partition_nodes="n[1-8]")
    journal = tmp_path / "journal"
    journal.mkdir()
    (journal / f".sweep-{os.geteuid()}").symlink_to("/nonexistent")

    done = slurm_health("sweep", "-p", "main", f"--journal={journal}", environ=slurm.environ())

    assert f"journal {journal}/.sweep-{os.geteuid()}: cannot be" in done.stderr, done
    assert done.code == 4, done
    assert not slurm.calls("sbatch")


@pytest.mark.torch
def test_a_job_that_another_turn_has_just_submitted_has_not_ended(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", [f"n{number}" for number in range(1, 9)])
    slurm.set(partition_nodes="n[1-8]")
    kept = tmp_path / "journal" / f".sweep-{os.geteuid()}"
    kept.mkdir(parents=True, mode=0o700)
    environ = slurm.environ()
    # It begins to write right after Slurm has said which jobs there are.
    squeue = tmp_path / "first" / "squeue"
    squeue.parent.mkdir()
    real = shutil.which("squeue", path=environ["PATH"])
    squeue.write_text(f'#!/bin/sh\n{real} "$@" || exit\n: > {kept}/4711.out\n')
    squeue.chmod(0o755)
    environ["PATH"] = f"{squeue.parent}:{environ['PATH']}"
    (kept / "4700.out").write_text("slurm-health sweep: the check ended with 0\n")

    words = ("sweep", "-p", "main", f"--journal={kept.parent}", f"--python={sys.executable}")
    done = slurm_health(*words, environ=environ)

    assert "of 1 job that has ended, 1 checked its nodes\n" in done.stderr, done
    assert [each.name for each in kept.iterdir()] == ["4711.out"]
