# SPDX-License-Identifier: Apache-2.0
"""Spare nodes: a job leaves bad nodes behind without leaving its allocation."""

from __future__ import annotations

import pytest

from slurm_health.records.nodeset import expand
from tests.lab.installed_site import Site
from tests.lab.played_nodes import UNREACHABLE, play, submit

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

SCRIPT = """\
#!/bin/sh
echo "nodes $SLURM_NNODES $SLURM_JOB_NUM_NODES $SLURM_JOB_NODELIST"
echo "tasks $SLURM_NTASKS $SLURM_TASKS_PER_NODE attempt ${SLURM_RESTART_COUNT:-0}"
echo "ran on $(srun hostname | sort | xargs)"
"""


@pytest.mark.heavy
def test_a_bad_node_is_left_behind_without_a_requeue(site: Site) -> None:
    script = site.script("train.sh", SCRIPT)
    play(site, n3=UNREACHABLE)
    job = submit(site, "-N3", "--spares=1", "-x", "n[5-6]", script, script="")
    record = site.ended(job)
    assert record["JobState"] == "COMPLETED", site.read(f"slurm-{job}.out")
    assert record["NodeList"] == "n[1-2,4]"
    assert record["Restarts"] == "0"
    assert f"ran on {' '.join(expand(record['NodeList']))}" in site.read(f"slurm-{job}.out")
    assert "gave back n3" in site.table(job)
    assert site.drained() == {}


@pytest.mark.heavy
def test_a_bad_batch_host_cannot_be_given_back_so_the_job_is_requeued(site: Site) -> None:
    script = site.script("train.sh", SCRIPT)
    play(site, n1=UNREACHABLE)
    job = submit(site, "-N3", "--spares=1", script, script="")
    record = site.ended(job)
    assert record["JobState"] == "COMPLETED", site.read(f"slurm-{job}.out")
    assert record["Restarts"] == "1"
    assert record["ExcNodeList"] == "n1"
    assert len(expand(record["NodeList"])) == 3
    assert "n1" not in expand(record["NodeList"])


@pytest.mark.heavy
def test_a_job_that_makes_do_with_fewer_nodes_goes_on_smaller(site: Site) -> None:
    script = site.script("train.sh", SCRIPT)
    play(site, n2=UNREACHABLE)
    job = submit(site, "--nodes=3-4", "-x", "n[5-6]", script, script="")
    record = site.ended(job)
    assert record["JobState"] == "COMPLETED", site.read(f"slurm-{job}.out")
    assert record["NodeList"] == "n[1,3-4]"
    assert record["Restarts"] == "0"
