# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from slurm_health.preflight.probes import torch_group

LOG = """\
n1:71:93 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>
n1:71:93 [0] NCCL INFO Using network IB
n1:71:93 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
n1:71:93 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""


def said(log: str) -> str:
    """Return what is read from a log that a library wrote where it was told to."""
    environ: dict[str, str] = {}
    torch_group.record_ways(environ)
    with Path(environ["NCCL_DEBUG_FILE"]).open("w") as file:
        file.write(log)
    return torch_group.ways_used(environ, on_cuda=True)


def test_the_way_is_the_one_that_nccl_connected_by() -> None:
    assert said(LOG) == "NET/IB with GPUDirect RDMA"
    assert said(LOG.replace("/GDRDMA", "").replace("/IB/", "/Socket/")) == "NET/Socket"
    assert said(LOG.replace("IB/0/", "IB/3(2)/")) == "NET/IB with GPUDirect RDMA"
    assert (
        said(LOG.replace("IB/0/", "AWS Libfabric/3(2)/")) == "NET/AWS Libfabric with GPUDirect RDMA"
    )
    assert said("") == ""


def test_a_log_that_the_user_wants_is_left_to_him() -> None:
    environ = {"NCCL_DEBUG": "WARN"}
    torch_group.record_ways(environ)

    assert environ == {"NCCL_DEBUG": "WARN"}
    assert torch_group.ways_used(environ, on_cuda=True) == ""


def test_over_gloo_it_is_the_interface() -> None:
    assert torch_group.ways_used({"GLOO_SOCKET_IFNAME": "ib0"}, on_cuda=False) == "ib0"
