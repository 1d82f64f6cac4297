# SPDX-License-Identifier: Apache-2.0
"""What a job's comment says of a check that could not measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.preflight.acting.unchecked import comment_on_job
from slurm_health.records.records import Unchecked
from tests.support.fake_slurm import FakeSlurm

JOB = 12
FOUND = Unchecked(reason="no torch", remedy="name an interpreter")
NOTE = "slurm-health: UNCHECKED: no torch; name an interpreter"


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.run_job(JOB, ["n1", "n2"], Comment="mine")
    return slurm


def test_the_comment_keeps_the_jobs_own_however_often_it_is_set(slurm: FakeSlurm) -> None:
    for _ in range(2):
        comment_on_job(FOUND, str(JOB), slurm.environ())
        assert slurm.job(JOB)["Comment"] == f"{NOTE} | own comment: mine"


@pytest.mark.parametrize("refused", ["squeue", "update"])
def test_a_comment_that_cannot_be_read_or_set_ends_nothing(slurm: FakeSlurm, refused: str) -> None:
    slurm.set(refuse={"--format=%k" if refused == "squeue" else "update": "no"})
    comment_on_job(FOUND, str(JOB), slurm.environ())
    assert slurm.job(JOB)["Comment"] == "mine"
