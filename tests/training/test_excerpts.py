# SPDX-License-Identifier: Apache-2.0
"""What people quote of an output often begins behind the traceback, or is one line of it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from slurm_health.training.monitor.explain import explain

_WATCHDOG = (
    "[rank{rank}]:[E1102 10:11:12.345 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught"
    " collective operation timeout: WorkNCCL(SeqNum={number}, OpType={what}, NumelIn=8,"
    " NumelOut=8, Timeout(ms)=600000) ran for 600071 milliseconds before timing out."
)


def ended(node: str, rank: int, how: str = "Exited with exit code 1") -> str:
    return f"srun: error: {node}: task {rank}: {how}"


class Excerpt(NamedTuple):
    """What was quoted, how srun told the end, and what is right: cause, blame, confidence."""

    text: str
    end: str
    right: tuple[str, str, str]


EXCERPTS = {
    "another process on the GPU": Excerpt(
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has"
        " a total capacity of 79.15 GiB of which 1.10 GiB is free. Process 48213 has 40.21 GiB"
        " memory in use. Including non-PyTorch memory, this process has 37.80 GiB memory in use.",
        ended("n2", 3),
        ("gpu-occupied", "undecided", "likely"),
    ),
    "a rendezvous at a host without the job": Excerpt(
        "[rank5]: torch.distributed.DistNetworkError: The client socket has timed out after"
        " 600000ms while trying to connect to (login1, 29500).",
        ended("n3", 5),
        ("wrong-master-address", "user", "likely"),
    ),
    "an exception of C++ that aborts": Excerpt(
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed.\n"
        "Last error:\n"
        "socketPollConnect: Connect to 10.0.3.7<41235> returned 113(No route to host)",
        ended("n4", 9, "Aborted"),
        ("connections-broke", "transient", "possible"),
    ),
    "a data loader's worker that ended": Excerpt(
        "[rank0]: RuntimeError: DataLoader worker (pid(s) 12345) exited unexpectedly",
        ended("n1", 0),
        ("loader-worker-ended", "undecided", "likely"),
    ),
    "a stale file handle": Excerpt(
        "OSError: [Errno 116] Stale file handle: '/scratch/ckpt/step_1000.pt'",
        ended("n6", 12),
        ("filesystem-failed", "undecided", "likely"),
    ),
    "an adapter that found no peer": Excerpt(
        "n1:99:140 [0] misc/ibvwrap.cc:160 NCCL WARN Call to ibv_modify_qp failed with error"
        " Connection timed out",
        ended("n1", 0),
        ("adapter-not-connected", "undecided", "possible"),
    ),
    "an adapter that gave up sending": Excerpt(
        "n3:5512:5601 [1] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer"
        " 10.0.0.4<53212> with status=12 opcode=0 len=0 vendor err 129 (Recv)\n"
        "[rank9]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970,"
        " remote process exited or there was a network error, NCCL version 2.21.5\n"
        "[rank9]: ncclRemoteError: A call failed possibly due to a network error",
        ended("n3", 9),
        ("adapter-errors", "undecided", "possible"),
    ),
    "one rank in another collective": Excerpt(
        "\n".join(
            _WATCHDOG.format(
                rank=rank, number=1042 if rank else 1041, what="ALLREDUCE" if rank else "BROADCAST"
            )
            for rank in (1, 2, 3, 0)
        ),
        ended("n1", 0, "Aborted (core dumped)"),
        ("collective-timed-out", "undecided", "possible"),
    ),
    "an exception without words": Excerpt(
        "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        ended("n1", 0),
        ("rendezvous-never-formed", "undecided", "likely"),
    ),
    "the last error of NCCL": Excerpt(
        "[rank7]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, unhandled"
        " cuda error, NCCL version 2.19.3\n"
        "[rank7]: ncclUnhandledCudaError: Call to CUDA function failed.\n"
        "[rank7]: Last error:\n"
        "[rank7]: Cuda failure 'an illegal memory access was encountered'",
        ended("n4", 7),
        ("illegal-access", "undecided", "likely"),
    ),
    "a model that is not there": Excerpt(
        "[rank0]: OSError: /data/models/llama does not appear to have a file named config.json.",
        ended("n1", 0),
        ("model-files-missing", "user", "likely"),
    ),
    "a crash whose library says why": Excerpt(
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient"
        " shared memory (shm).",
        ended("n2", 1, "Bus error (core dumped)"),
        ("shared-memory-full", "undecided", "possible"),
    ),
    "a library of the node that is too old": Excerpt(
        "RuntimeError: Failed to import transformers.models.llama because of the following error:"
        " /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.30' not found",
        ended("n7", 8),
        ("library-too-old", "undecided", "likely"),
    ),
    "an exception among lines of its rank": Excerpt(
        "[rank0]:[W] Loss is odd at step 1204\n"
        "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.",
        ended("n1", 0),
        ("not-a-number", "user", "likely"),
    ),
    "an exception that the program got over": Excerpt(
        "ValueError: no config for this host, taking the default\nloaded 4 shards\n"
        "FATAL: cannot open the license server",
        ended("n1", 0),
        ("rank-failed", "undecided", "likely"),
    ),
}


@pytest.mark.parametrize("name", EXCERPTS)
def test_an_excerpt_without_its_traceback_is_understood(name: str, tmp_path: Path) -> None:
    excerpt = EXCERPTS[name]
    path = tmp_path / "job.out"
    path.write_text(f"{excerpt.text}\n{excerpt.end}\n")
    nodes = tuple(f"n{number}" for number in range(1, 9))
    _, explanation = explain([path], nodes=nodes)
    right = explanation.cause, explanation.blame, explanation.confidence
    assert right == excerpt.right
    assert explanation.accused == []
