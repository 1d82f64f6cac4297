# SPDX-License-Identifier: Apache-2.0
"""When a job would start, from what `sbatch --test-only` of 22.05.8 printed on the lab."""

from __future__ import annotations

import pytest

from slurm_health.records.allocation import Estimate
from slurm_health.records.errors import SlurmError
from slurm_health.system.slurm.job_gres import options_on
from slurm_health.system.slurm.real_sbatch import estimate_of

STARTS = (
    "sbatch: Job 5 to start at 1795344695 using 3 processors on nodes n[4-6] in partition main\n"
)
# By 26.05.5.
WITH_ANOTHER_WORD = (
    "sbatch: Job 2 to start at 1795383304 a using 2 processors on nodes n5 in partition main\n"
)


def test_a_start_is_read_with_its_nodes_and_whom_it_would_end() -> None:
    start = Estimate(start_s=1795344695.0, nodes=("n4", "n5", "n6"))

    assert estimate_of(STARTS) == start
    assert estimate_of(f"sbatch: lua: hello\n{STARTS}") == start
    assert estimate_of(f"{STARTS}sbatch:   Preempts: 12,13\n").preempts
    assert estimate_of(WITH_ANOTHER_WORD) == Estimate(start_s=1795383304.0, nodes=("n5",))


@pytest.mark.parametrize("text", ["", "sbatch: hello", STARTS.replace("1795344695", "soon")])
def test_an_answer_that_gives_no_start_is_an_error(text: str) -> None:
    with pytest.raises(SlurmError, match="expected a start time"):
        estimate_of(text)


def test_what_a_job_has_on_a_node_is_asked_for_as_it_would_be_asked_for() -> None:
    shown = (
        "JobId=2 JobName=x JOB_GRES=gpu:a:6 Nodes=n[1-2] CPU_IDs=0-1,4 Mem=2000"
        " GRES=gpu:a:2(IDX:0-1),nic:1(CNT:1) Nodes=n3 CPU_IDs=0 Mem=0 GRES= MinCPUsNode=1\n"
    )

    assert options_on("n2", shown) == [
        "--cpus-per-task=3",
        "--mem=2000M",
        "--gres=gpu:a:2,nic:1",
    ]
    assert options_on("n3", shown) == ["--cpus-per-task=1"]
    with pytest.raises(ValueError, match="no share of n4"):
        options_on("n4", shown)
