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


def options(text: str, *nodes: str) -> dict[str, tuple[str, ...]]:
    return {",".join(each.nodes): each.options for each in shares(nodes, gres_of(text))}


EVEN = "n[1-2] gpu:4(IDX:0-3)"


@cases("system/slurm/job_gres.toml")
def test_however_the_job_asked_one_step_asks_for_all_that_a_node_has(asked: str) -> None:
    gres = gres_of(shown(asked, EVEN))

    (share,) = shares(["n1", "n2"], gres)

    assert share.options == ("--gres=gpu:4", "--gpu-bind=none")
    assert share.gpus == 4
    assert share.nodes == ("n1", "n2")


def test_a_step_on_one_of_the_nodes_does_not_ask_it_for_the_gpus_of_all() -> None:
    text = shown("TresPerJob=gres:gpu:8", EVEN)
    assert options(text, "n2") == {"n2": ("--gres=gpu:4", "--gpu-bind=none")}


def test_nodes_of_newer_slurms_with_the_same_number_share_a_step() -> None:
    asked = "TresPerJob=gres/gpu:14 ReqTRES=cpu=5 AllocTRES=cpu=5,mem=10000M,node=5"
    text = shown(asked, "n[1-3] gpu:4(IDX:0-3)", "n[4-5] gpu:1(IDX:0)")

    assert options(text, "n1", "n2", "n3", "n4", "n5") == {
        "n1,n2,n3": ("--gres=gpu:4", "--gpu-bind=none"),
        "n4,n5": ("--gres=gpu:1", "--gpu-bind=none"),
    }
    assert options(text, "n4") == {"n4": ("--gres=gpu:1", "--gpu-bind=none")}


def test_nodes_with_different_numbers_are_served_by_a_step_each_on_older_slurms() -> None:
    text = shown("TresPerJob=gres:gpu:5", "n1 gpu:4(IDX:0,1,2-3)", "n2 gpu:1(IDX:0)")

    assert options(text, "n1", "n2") == {
        "n1": ("--gpus=4", "--gpu-bind=none"),
        "n2": ("--gpus=1", "--gpu-bind=none"),
    }
    assert options(text, "n1") == {"n1": ("--gpus=4", "--gpu-bind=none")}


def test_other_resources_of_the_job_are_asked_for_too() -> None:
    even = shown("TresPerNode=gres:gpu:2,gres:nic:1", "n[1-2] gpu:2(IDX:0-1),nic(CNT:1)")
    uneven = shown("TresPerJob=gres:gpu:a:3", "n1 gpu:a:2(IDX:0-1),nic(CNT:1)", "n2 gpu:a:1(IDX:0)")

    assert options(even, "n1")["n1"][0] == "--gres=gpu:2,nic:1"
    assert options(uneven, "n1")["n1"] == ("--gpus=a:2", "--gpu-bind=none", "--gres=nic:1")


def test_types_are_named_where_the_job_named_them_or_named_nothing() -> None:
    both = "n1 gpu:a:2(IDX:0-1),gpu:b:1(IDX:2),gpu:1g.10gb:0(IDX:)"

    assert options(shown("", both), "n1")["n1"][0] == "--gres=gpu:a:2,gpu:b:1"
    assert options(shown("TresPerTask=gres:gpu:1", both), "n1")["n1"][0] == "--gres=gpu:3"


def test_a_job_without_gpus_or_a_node_that_slurm_does_not_show_asks_for_nothing() -> None:
    assert gres_of(shown("", "n[1-2] ")) == {"n1": NodeGres(), "n2": NodeGres()}
    assert options(shown("", "n[1-2] nic(CNT:1)"), "n1", "n2") == {"n1,n2": ()}
    assert options("slurm_load_jobs error", "n1", "n2") == {"n1,n2": ()}


@cases("system/slurm/job_gres.toml")
def test_slurm_is_asked_only_of_jobs_that_may_have_gpus(
    environ: dict[str, str], asked: bool
) -> None:
    assert may_have_gpus(environ) is asked
