# SPDX-License-Identifier: Apache-2.0
"""What a job has on its nodes, from what Slurm 22.05.8, 24.11.5 and 26.05.5 printed in the lab."""

from __future__ import annotations

from slurm_health.system.slurm.job_gres import NodeGres, gres_of, may_have_gpus, shares
from tests.cases import cases


def shown(asked: str, *groups: str) -> str:
    """Return one job as `scontrol show job -d -o` shows it, on groups of nodes with their GRES."""
    nodes = " ".join(
        f"Nodes={each.split()[0]} CPU_IDs=0-1 Mem=2000 GRES={''.join(each.split()[1:])}"
        for each in groups
    )
    return (
        f"JobId=2 JobName=x UserId=alice(2001) JOB_GRES=gpu:8 {nodes} "
        f"MinCPUsNode=1 Command=/bin/true {asked} CpusPerTres=gres:gpu:1 Power=\n"
    )


@cases("system/slurm/job_gres.toml")
def test_however_the_job_asked_its_steps_ask_for_all_that_nodes_have(
    asked: str, groups: list[str], steps: dict[str, tuple[str, ...]]
) -> None:
    gres = gres_of(shown(asked, *groups) if groups else "slurm_load_jobs error")
    nodes = ",".join(steps).split(",")
    assert {",".join(step.nodes): step.options for step in shares(nodes, gres)} == steps
    assert groups != ["n[1-2] "] or gres == {"n1": NodeGres(), "n2": NodeGres()}


@cases("system/slurm/job_gres.toml")
def test_slurm_is_asked_only_of_jobs_that_may_have_gpus(
    environ: dict[str, str], asked: bool
) -> None:
    assert may_have_gpus(environ) is asked
