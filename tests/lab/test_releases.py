# SPDX-License-Identifier: Apache-2.0
"""The lab with other Slurm releases; skipped for those that `make-root` has not made."""

import sys

import pytest

from . import Lab
from .installing import ROOTS, SUITES

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("version", sorted(SUITES))
def test_other_release_runs_jobs_with_our_interpreter(version: str) -> None:
    root = ROOTS / version
    if not root.is_dir():
        pytest.skip(f"no Slurm {version} (python -m tests.lab make-root {version})")
    with Lab.start(nodes=2, release=root) as lab:
        assert version in lab.run(["sbatch", "--version"]).stdout
        python = f"{sys.executable} -c 'import sys, ctypes, ssl, click; print(sys.executable)'"
        job_id = lab.sbatch(f"#!/bin/sh\nsrun -N2 -n2 {python}", "-N2")
        lab.wait_job(job_id)
        assert lab.job_output(job_id) == f"{sys.executable}\n" * 2
        lab.fault.slow_link("n2")
        lab.fault.drop("n2")
        lab.fault.starve_cpu("n2")
        lab.fault.kill_slurmd("n2")
        lab.reset()
