# SPDX-License-Identifier: Apache-2.0
"""What NCCL says in several lines, of adapters, and of exchanges that never came to their end."""

from __future__ import annotations

import pytest

from slurm_health.records.script_records import Diagnosed
from tests.support.ended_jobs import diagnosed_by_output

TIMED_OUT = (
    "[rank{rank}]:[E606 09:09:08.16 ProcessGroupNCCL.cpp:757] [Rank {rank}] Watchdog caught"
    " collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLGATHER, NumelIn=1, NumelOut=4,"
    " Timeout(ms)=600000) ran for 600004 milliseconds before timing out.\n"
)
ENQUEUED = (
    "[rank{rank}]:[E606 09:09:08.17 ProcessGroupNCCL.cpp:2395] [PG ID 0 PG GUID 0(default_pg)"
    " Rank {rank}]  failure detected by watchdog at work sequence id: 78 PG status: last enqueued"
    " work: {work}, last completed work: 77\n"
)
ADAPTER = "n2:57:59 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : "


def told(output: str, code: int = 1) -> Diagnosed:
    found = diagnosed_by_output(output, code, ("n1", "n2"))
    assert found.accused == []
    return found


def test_the_last_line_of_an_exception_of_nccl_is_evidence() -> None:
    no_room = (
        "Error while creating shared memory segment /dev/shm/nccl-a (size 9637888), error: No space"
        " left on device (28)"
    )
    lines = (
        "Traceback (most recent call last):",
        '  File "/home/alice/train.py", line 10, in main',
        "    dist.all_reduce(gradient)",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, system error",
        "ncclSystemError: A call failed. It may have been this, or that.",
        "Last error:",
        no_room,
    )
    found = told("".join(f"[rank0]: {line}\n" for line in lines))

    assert found.cause == "shared-memory-full"
    assert no_room in found.evidence[0]


def test_a_rank_that_nccl_has_not_counted_may_be_inside_the_call() -> None:
    output = "".join(
        TIMED_OUT.format(rank=rank) + ENQUEUED.format(rank=rank, work=79) for rank in (1, 2)
    )
    found = told(output + ENQUEUED.format(rank=0, work=77), code=134)

    assert (found.cause, found.ranks) == ("never-entered", [0])
    assert found.description.endswith("waited, or is held inside the call of it")


@pytest.mark.parametrize(
    ("what", "nodes"),
    [
        ("mlx5_2:1 Got async event : port error", ["n2"]),
        ("Got completion from peer 10.2.0.5<33092> with status=12 vendor err 129 hca mlx5_2", []),
    ],
)
def test_errors_of_adapters_are_told_and_hold_no_node_at_fault(what: str, nodes: list[str]) -> None:
    found = told(f"{ADAPTER}{what}\n{TIMED_OUT.format(rank=1)}", code=134)

    assert (found.cause, found.attribution, found.nodes) == ("adapter-errors", "undecided", nodes)
    assert found.evidence[0] == f"NCCL on n2: {what}"
