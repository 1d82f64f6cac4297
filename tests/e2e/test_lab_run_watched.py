# SPDX-License-Identifier: Apache-2.0
"""`srun slurm-health run` watches the training that it becomes: no line in it, and no sbatch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.installed_site import COMMAND, Site

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.timeout(1200),
]

TRAINING = Path(__file__).parents[1] / "support" / "training.py"
RUN = f"""#!/bin/bash
#SBATCH -N3 --ntasks-per-node=1 --output=run-%j.out --no-requeue
export OMP_NUM_THREADS=1
srun {COMMAND} run "$@" training.py "$CAUSE" 1 --silent --step-s=1 --at=45 --times=1 --steps=60
"""


@pytest.fixture
def training(site: Site) -> Site:
    site.script("training.py", TRAINING.read_text())
    site.script("run.sh", RUN)
    for left in site.lab.home("alice").glob("pid-*"):
        left.unlink()
    for left in site.lab.home("alice").glob("training.failed-*"):
        left.unlink()
    return site


def submitted(site: Site, *words: str, cause: str = "stop", nodes: int = 3) -> int:
    """Submit the batch script to Slurm's own sbatch."""
    argv = ["sbatch", "--parsable", f"-N{nodes}", f"--export=ALL,CAUSE={cause}", "run.sh", *words]
    ran = site.lab.run(argv, user="alice")
    return int(ran.stdout)


def test_one_that_trains_alone_is_ended_by_its_torchrun_and_its_job_is_not_cancelled(
    training: Site,
) -> None:
    words = ("--standalone", "--nproc-per-node=2", "--monitor=stop")
    job = submitted(training, *words, nodes=1)

    assert training.ended(job, 1100)["JobState"] == "FAILED", training.read(f"run-{job}.out")
    said = training.read(f"run-{job}.out")
    assert "rank 1 on n1 has been stopped by a signal" in said
    assert "the training ends: it hangs (--monitor=stop)" in said
    training.assert_nothing_left()


def test_one_that_is_to_be_restarted_when_it_hangs_goes_on_after_a_check(training: Site) -> None:
    job = submitted(training, "--monitor=restart", "--max-restarts=1")

    assert training.ended(job, 1100)["JobState"] == "COMPLETED", training.read(f"run-{job}.out")
    said = training.read(f"run-{job}.out")
    assert "the training hung: rank 1 on n2 has been stopped by a signal" in said
    assert "checking n[1-3] before the workers start (restart 1 of 1)" in said
    training.assert_nothing_left()
