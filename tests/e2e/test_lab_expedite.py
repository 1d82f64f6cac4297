# SPDX-License-Identifier: Apache-2.0
"""Slurm's own expedited requeue (25.11 and later), beside ours.

The page what-happens-to-my-job says why we do not use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.records.nodeset import expand
from tests.lab import Lab, played_nodes
from tests.lab.installed_site import Site
from tests.lab.installing import ROOTS
from tests.lab.played_nodes import FAULTY

RELEASE = ROOTS / "26.05"

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(not RELEASE.is_dir(), reason=f"no Slurm 26.05 in {RELEASE}"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def expedite_site() -> Iterator[Site]:
    """A cluster that allows expedited requeues."""
    conf = "SlurmctldParameters=enable_expedited_requeue"
    with Lab.start(nodes=6, release=Path(RELEASE), slurm_conf_extra=conf) as lab:
        yield Site(lab)


def test_a_job_that_chose_expedited_requeue_leaves_a_bad_node_like_any_other(
    expedite_site: Site,
) -> None:
    site = expedite_site
    played_nodes.play(site, n3=FAULTY)
    job = played_nodes.submit(site, "-N4", "--requeue=expedite")
    record = site.ended(job)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1"), site.lab.job_output(job)
    assert record["ExcNodeList"] == "n3"
    assert "n3" not in expand(record["NodeList"])


def test_a_failing_script_of_such_a_job_is_held_by_slurm_and_not_failed(
    expedite_site: Site,
) -> None:
    """Why we do not choose it for anybody: a job must end with its own script's code."""
    lab = expedite_site.lab
    job = lab.sbatch("#!/bin/sh\nexit 1\n", "-N1", "--requeue=expedite")
    held = lab.wait_job(job, {"REQUEUE_HOLD"})
    assert held["Priority"] == "0"
    assert held["ExpeditedRequeue"] == "Yes"
    lab.cancel_all()


def test_it_cannot_be_chosen_for_a_job_that_runs(expedite_site: Site) -> None:
    lab = expedite_site.lab
    job = lab.sbatch("#!/bin/sh\nsleep 100\n", "-N1")
    lab.wait_job(job, {"RUNNING"})
    argv = ["scontrol", "update", f"JobId={job}", "Requeue=expedite"]
    assert lab.run(argv, user="alice", check=False).returncode != 0
    lab.cancel_all()
