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
NO_PARAMETERS = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/home/alice/train.py", line 69, in main
[rank{rank}]:     model = DDP(model)
[rank{rank}]: RuntimeError: DDP expects same model across all ranks, but Rank {rank} has 51 params,\
 while rank 0 has inconsistent 0 params.
"""
ENQUEUED = (
    "[rank{rank}]:[E606 09:09:08.17 ProcessGroupNCCL.cpp:2395] [PG ID 0 PG GUID 0(default_pg)"
    " Rank {rank}]  failure detected by watchdog at work sequence id: 78 PG status: last enqueued"
    " work: {work}, last completed work: 77\n"
)
MEANT = {
    "ncclUnhandledCudaError": "unhandled cuda error",
    "ncclSystemError": "unhandled system error",
    "ncclInvalidUsage": "invalid usage",
    "ncclInternalError": "internal error",
    "ncclRemoteError": "remote process exited or there was a network error",
}
NO_ROOM = (
    "Error while creating shared memory segment /dev/shm/nccl-a (size 9637888), error: No space"
    " left on device (28)"
)
NOT_STARTED = """\
slurmstepd: error: pyxis: container start failed with error code: 1
slurmstepd: error: pyxis:     id: cannot find name for user ID 42
slurmstepd: error: pyxis: couldn't start container
srun: error: n2: task 0: Exited with exit code 1
"""
NOT_HAD = """\
URL https://images.example/v2/latest returned error code: 401 Unauthorized
pyxis: failed to import docker image
spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
"""
ADAPTER = "n2:57:59 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : "


def nccl_error(result: str, last: str) -> str:
    """Return an exception of NCCL's as PyTorch words it, over several lines."""
    lines = (
        "Traceback (most recent call last):",
        '  File "/home/alice/train.py", line 10, in main',
        "    dist.all_reduce(gradient)",
        f"torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, {MEANT[result]}",
        f"{result}: A call failed. It may have been this, or that.",
        "Last error:",
        last,
    )
    return "".join(f"[rank0]: {line}\n" for line in lines)


def told(output: str, code: int = 1) -> Diagnosed:
    found = diagnosed_by_output(output, code, ("n1", "n2"))
    assert found.accused == []
    return found


@pytest.mark.parametrize(
    ("result", "last", "cause", "attribution"),
    [
        (
            "ncclUnhandledCudaError",
            "Cuda failure 'uncorrectable ECC error encountered'",
            "gpu-broken",
            "undecided",
        ),
        ("ncclSystemError", NO_ROOM, "shared-memory-full", "user error"),
        (
            "ncclInvalidUsage",
            "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
            "duplicate-gpu",
            "user error",
        ),
        (
            "ncclInvalidUsage",
            "Error: network AWS Libfabric not found.",
            "network-plugin-missing",
            "user error",
        ),
        (
            "ncclSystemError",
            "Error: failed to extend /dev/shm/nccl-a to 96 bytes, error: No space left on device",
            "shared-memory-full",
            "user error",
        ),
        # Of a full /dev/shm older ones tell no reason.
        (
            "ncclSystemError",
            "Error while creating shared memory segment nccl-shm-recv-1a (size 5767520)",
            "rank-failed",
            "undecided",
        ),
        (
            "ncclInternalError",
            "Bootstrap : no socket interface found",
            "network-interface-missing",
            "undecided",
        ),
        (
            "ncclInvalidUsage",
            "Bootstrap : no socket interface found",
            "network-interface-missing",
            "undecided",
        ),
        (
            "ncclInternalError",
            "ncclSocketInit: connecting to address with family 59936 is neither AF_INET(2) nor 10",
            "network-interface-missing",
            "undecided",
        ),
        (
            "ncclInvalidUsage",
            "Failed to initialize any NET plugin",
            "network-plugin-missing",
            "undecided",
        ),
        (
            "ncclSystemError",
            "Call to ibv_reg_mr failed with error Cannot allocate memory",
            "locked-memory-limit",
            "undecided",
        ),
        (
            "ncclUnhandledCudaError",
            "Cuda failure 2 'out of memory'",
            "gpu-out-of-memory",
            "undecided",
        ),
        (
            "ncclSystemError",
            "unlink shared memory /dev/shm/nccl-a1 failed, error: No such file or directory (2)",
            "shared-memory-removed",
            "undecided",
        ),
        (
            "ncclRemoteError",
            "socketProgress: Connection closed by remote peer n2<41>",
            "connections-broke",
            "transient",
        ),
    ],
)
def test_the_last_line_of_an_exception_of_nccl_says_what_it_was(
    result: str, last: str, cause: str, attribution: str
) -> None:
    found = told(nccl_error(result, last))

    assert (found.cause, found.attribution) == (cause, attribution)
    assert last in found.evidence[0]


def test_sizes_that_an_exchange_which_timed_out_did_not_bring_are_no_users_mistake() -> None:
    ranks = range(4)
    output = "".join(TIMED_OUT.format(rank=rank) for rank in ranks)
    found = told(output + "".join(NO_PARAMETERS.format(rank=rank) for rank in ranks))

    assert (found.cause, found.attribution) == ("collective-timed-out", "undecided")


def test_a_model_that_differs_between_ranks_is_still_its_users_mistake() -> None:
    output = "".join(NO_PARAMETERS.format(rank=rank) for rank in range(2))
    found = told(output.replace("inconsistent 0 params", "inconsistent 50 params"))

    assert found.attribution == "user error"


def test_one_rank_that_timed_out_tells_not_who_stayed_away() -> None:
    found = told(TIMED_OUT.format(rank=0), code=134)

    assert (found.cause, found.attribution) == ("collective-timed-out", "undecided")
    assert found.nodes == []


def test_a_rank_that_its_watchdog_ends_by_an_error_of_nccl_has_not_timed_out() -> None:
    output = (
        "[rank0]:[E606 09:09:08.17 ProcessGroupNCCL.cpp:2174] [PG ID 0 PG GUID 0(default_pg) Rank"
        " 0] Process group watchdog thread terminated with exception: NCCL error: remote process"
        " exited or there was a network error, NCCL version 2.27.5\n"
    )

    assert told(output, code=134).cause == "connections-broke"


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


def test_what_nccl_says_of_its_adapters_when_all_is_well_is_no_error() -> None:
    well = "n2:57:59 [0] NCCL INFO NET/IB : Using [0]mlx5_2:1/IB [RO]; OOB ib0:10.0.0.1<0>\n"

    assert told(f"{well}{TIMED_OUT.format(rank=1)}", code=134).cause == "collective-timed-out"


@pytest.mark.parametrize("output", [NOT_STARTED, NOT_HAD], ids=["not started", "not had"])
def test_a_container_that_did_not_start_is_told_and_neither_user_nor_node_is_blamed(
    output: str,
) -> None:
    found = told(output)

    assert (found.cause, found.attribution) == ("container-not-started", "undecided")


def test_words_alone_blame_no_ranks_user() -> None:
    output = "n2:57:59 [0] net.cc:626 NCCL WARN Error: network AWS Libfabric not found.\n"

    assert told(output).attribution == "user error"
    found = told(f"{output}srun: error: n2: task 0: Exited with exit code 1\n")
    assert (found.cause, found.attribution) == ("network-plugin-missing", "undecided")


TORCHRUN = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-02-05_18:20:01
  host      : n1
  rank      : {rank} (local_rank: {rank})
  exitcode  : -6 (pid: 16609)
  error_file: <N/A>
  traceback : Signal 6 (SIGABRT) received by PID 16609
"""
OLD_WATCHDOG = (
    "[E ProcessGroupNCCL.cpp:587] [Rank 3] Watchdog caught collective operation timeout:"
    " WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1801530 milliseconds before timing"
    " out.\n"
)
STUCK = (
    "[rank4]:[E205 18:11:06.375 ProcessGroupNCCL.cpp:1870] [PG ID 12 PG GUID 99(EXPERT) Rank 4]"
    " ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring"
    " enqueued collectives.\n"
)
ENDED_STUCK = (
    "[rank4]:[F205 18:19:06.376 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank 4]"
    " Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL"
    " watchdog hang.\n"
)


@pytest.mark.parametrize("words", [OLD_WATCHDOG, OLD_WATCHDOG.partition("] ")[2]])
def test_an_abort_by_a_watchdog_that_says_its_number_alone_is_no_crash(words: str) -> None:
    found = told(words + TORCHRUN.format(rank=3), code=134)

    assert (found.cause, found.attribution) == ("collective-timed-out", "undecided")
    assert found.nodes == []


def test_the_abort_of_another_rank_than_the_watchdog_says_may_be_why_it_waited() -> None:
    found = told(OLD_WATCHDOG + TORCHRUN.format(rank=2), code=134)

    assert (found.cause, found.attribution) == ("crashed", "undecided")


@pytest.mark.parametrize("words", [STUCK, ENDED_STUCK, STUCK + ENDED_STUCK])
def test_a_rank_that_is_ended_because_its_watchdog_was_stuck_has_not_crashed(words: str) -> None:
    found = told(words + TORCHRUN.format(rank=4), code=134)

    assert (found.cause, found.attribution) == ("watchdog-stuck", "undecided")
    assert found.nodes == []
