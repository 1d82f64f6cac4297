# SPDX-License-Identifier: Apache-2.0
"""Logs that people who trained large models put into their chronicles and handbooks.

A case is a block of a page, found by words that stand in no other; what was the matter is what the
page says around it. A node that is accused where it says that none was at fault is an innocent.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.replay.source import Source
from benchmarks.replay.threads import Truth, score_logs

_FENCED = re.compile(r"^[ ]*```[^\n]*\n(.*?)^[ ]*```", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(
    r"::[^\n]*\n(?:[ ]*\n)+((?:[ ]+[^\n]+\n|[ ]*\n)+)"
)  # as reStructuredText has it
_KILLED, _ABORTED = 137, 134
_BROKEN_GPU = frozenset({"gpu-broken"})
_UNREACHABLE = frozenset({"connections-broke", "peer-unreachable"})
_GPU_MEMORY = (frozenset({"gpu-out-of-memory"}), False, 1)
_KILL = (frozenset({"killed-for-memory", "killed"}), False, _KILLED)
_PROGRAM = (frozenset({"program-error", "same-error-everywhere"}), False, 1)

_CHRONICLES: Mapping[tuple[str, str], Truth] = {
    # One of the GPUs crashed.
    ("train/tr11-176B-ml/chronicles.md", "CUDA error: unknown error"): (
        _BROKEN_GPU, True, _ABORTED),
    # 94 GB of /dev/shm on each node, and yet: a suspicion of one node, which was not confirmed.
    ("train/tr1-13B-base/chronicles.md", "is killed by signal: Bus error"): (
        frozenset({"shared-memory-full"}), False, 1),
    # One node was faulty: the same job failed on it again, with another error.
    ("train/tr1-13B-base/chronicles.md", "cudaErrorECCUncorrectable"): (
        _BROKEN_GPU, True, _ABORTED),
    ("train/tr1-13B-base/chronicles.md", "RuntimeError: CUDA error: out of memory"): (
        _BROKEN_GPU, True, 1),
    # The network of another node was broken.
    ("jz/slurm/README.md", "ncclSystemError: System call"): (_UNREACHABLE, True, 1),
    ("jz/slurm/README.md", "failed : Connection refused"): (_UNREACHABLE, True, 1),
}  # fmt: skip
_DEBUG = "debug/pytorch.md"
_HANDBOOK: Mapping[tuple[str, str], Truth] = {
    (_DEBUG, "Tried to allocate 55.88 GiB"): _GPU_MEMORY,
    (_DEBUG, "of which 28.63 GiB is free"): _GPU_MEMORY,
    (_DEBUG, "Error detected in MulBackward0. Traceback of forward call"): _GPU_MEMORY,
    (_DEBUG, "Tried to allocate 1024.00 MiB"): _GPU_MEMORY,
    (_DEBUG, "1997\nKilled"): _KILL,
    (_DEBUG, "mat1 and mat2 shapes cannot be multiplied"): (
        frozenset({"wrong-shape"}), False, 1),
    (_DEBUG, "Expected all tensors to be on the same device"): (
        frozenset({"device-mismatch"}), False, 1),
    (_DEBUG, "expected both vectors to have same dtype"): (
        frozenset({"wrong-type"}), False, 1),
    (_DEBUG, "AssertionError: Tensor-likes are not equal"): _PROGRAM,
    (_DEBUG, "OSError: [Errno 28] No space left on device"): (frozenset({"disk-full"}), False, 1),
    (_DEBUG, "OpType=ALLREDUCE, NumelIn=4"): (
        frozenset({"ranks-waited", "never-entered", "mismatched-collective"}), False, _ABORTED),
    (_DEBUG, "Got completion from peer"): (_UNREACHABLE, True, 1),
    (_DEBUG, "[host1:3]AttributeError"): _PROGRAM,
    (_DEBUG, "self.dataset_proba.sum() != 1:\n    if self"): _PROGRAM,
    ("training/fault-tolerance/README.md", "Tried to allocate 304.00 MiB"): _GPU_MEMORY,
    ("compute/accelerator/nvidia/debug.md", "CUDA error: uncorrectable ECC error"): (
        _BROKEN_GPU, True, 1),
}  # fmt: skip

_NO_PLUGIN = (frozenset({"network-plugin-missing"}), False, 1)
_CONTAINER = frozenset({"container-not-started"})
_CSCS: Mapping[tuple[str, str], Truth] = {
    ("software/communication/nccl.md", "[1] net.cc:626 NCCL WARN Error: network"): _NO_PLUGIN,
    ("software/communication/nccl.md", "Could not find: ofi libnccl-net-ofi.so"): _NO_PLUGIN,
    # The user of an account that some nodes do not know yet.
    ("software/container-engine/known-issue.md", "cannot find name for user ID 42"): (
        frozenset({"user-unknown"}), True, 1),
    # An image whose C library the site's hooks do not fit.
    ("software/container-engine/known-issue.md", "refresh the dynamic linker cache"): (
        _CONTAINER, False, 1),
    # More processes than GPUs, which are for one process each.
    ("software/container-engine/resource-hook.md", "is/are busy or unavailable"): (
        frozenset({"no-gpu"}), False, 1),
    # A broken library in the image.
    ("software/ml/pytorch.md", "ucs_handle_error+0x2cc"): (frozenset({"crashed"}), False, 139),
    ("software/communication/openmpi.md", "Signal: Segmentation fault (11)"): (
        frozenset({"crashed"}), False, 139),
    # A program that was linked without a library which its user asked for.
    ("software/communication/cray-mpich.md", "GTL library is not linked"): (
        frozenset({"program-error", "mpi-failed"}), False, 255),
}  # fmt: skip
_AWS = "awsome-distributed-training"
_SITES: Mapping[tuple[str, str], Truth] = {
    ("support-docs/docs/Getting_Started/FAQs/What_Does_Oom_Kill_Mean.md", "Detected 1 oom-kill"): (
        frozenset({"killed-for-memory"}), False, 1),
    ("lumi-userguide/docs/runjobs/scheduled-jobs/interactive.md", "Unable to create step"): (
        frozenset({"step-refused"}), False, 1),
    # A rank whose share of the data was smaller.
    ("lance-distributed-training/README.md", "OpType=ALLREDUCE, NumelIn=1259621"): (
        frozenset({"ranks-waited", "never-entered", "collective-timed-out"}), False, 1),
    (f"{_AWS}/3.test_cases/megatron/megatron-lm/slurm/gpt3/README.md", "num_samples > 0"): _PROGRAM,
    # An image that was named without its registry.
    (
        f"{_AWS}/4.validation_and_observability/2.gpu-cluster-healthcheck/README.md",
        "failed to import docker image",
    ): (frozenset({"image-not-found"}), False, 1),
    # Libraries of several releases of CUDA.
    (
        f"{_AWS}/3.test_cases/pytorch/deepspeed/qlora/docs/TROUBLESHOOTING.md",
        "CUBLAS_STATUS_INVALID_VALUE when calling",
    ): (frozenset({"gpu-library-failed"}), False, 1),
}  # fmt: skip

_GUIDE = "docs/userguide/source/troubleshooting"
_LIMIT = (frozenset({"locked-memory-limit"}), False, 1)
_NCCL: Mapping[tuple[str, str], Truth] = {
    (f"{_GUIDE}/runtime_and_mpi_issues.rst", "failed to extend /dev/shm/"): (
        frozenset({"shared-memory-full"}), False, 1),
    # The node's systemd took it for a file of a user who has gone.
    (f"{_GUIDE}/runtime_and_mpi_issues.rst", "unlink shared memory"): (
        frozenset({"shared-memory-removed"}), False, 1),
    (f"{_GUIDE}/runtime_and_mpi_issues.rst", "PMIX ERROR"): (
        frozenset({"mpi-failed"}), False, 1),
    (f"{_GUIDE}/runtime_and_mpi_issues.rst", "UCX  WARN  network device"): (
        frozenset({"network-setting-wrong"}), False, 1),
    (f"{_GUIDE}/runtime_and_mpi_issues.rst", "no active messages transport"): (
        frozenset({"mpi-failed"}), False, 1),
    (f"{_GUIDE}/networking_troubleshooting.rst", "Call to ibv_create_qp failed"): _LIMIT,
    (f"{_GUIDE}/networking_troubleshooting.rst", "Call to ibv_reg_mr failed"): _LIMIT,
    # A number of NCCL_IB_GID_INDEX that is not that of the network.
    (f"{_GUIDE}/networking_troubleshooting.rst", "Call to ibv_modify_qp failed"): (
        frozenset({"network-setting-wrong"}), False, 1),
}  # fmt: skip
_HANGING = "tr_141-hanging/tr_141_cm409xPMD01_scale_leap_of_faith_v5_num_workers"
_NODE_LOST = (frozenset({"node-lost"}), True, 1)
_M4: Mapping[tuple[str, str], Truth] = {
    (f"{_HANGING}_02/README.md", "Node failure on jean-zay-iam49"): _NODE_LOST,
    (f"{_HANGING}_06/README.md", "Node failure on jean-zay-iam37"): _NODE_LOST,
    # One whole node did not answer any more.
    (f"{_HANGING}_0-try5/README.md", "CUDA error: unknown error"): (
        frozenset({"node-lost", "gpu-broken"}), True, _ABORTED),
    (f"{_HANGING}_0-try3/README.md", "'jsonl' is not a valid LoggingTypes"): _PROGRAM,
}  # fmt: skip
_KILLED_FOR_MEMORY = (frozenset({"killed-for-memory"}), False, 1)
_CENTRES: Mapping[tuple[str, str], Truth] = {
    ("scicomp-docs/triton/tut/interactive.rst", "StepId=463531.0"): _KILLED_FOR_MEMORY,
    ("scicomp-docs/triton/tut/interactive.rst", "StepId=5766825.0"): _KILLED_FOR_MEMORY,
    (
        "User_Codes/Training/Advanced_Cluster_Usage/Exercise1/Python/README.md",
        "slurmstepd: error: Detected 1 oom_kill",
    ): _KILLED_FOR_MEMORY,
    # A server that its user ended.
    ("User_Codes/AI/heavyAI/heavyAI.err", "CANCELLED AT"): (
        frozenset({"ended-from-outside", "cancelled"}), False, 143),
    # A program that was built for another mode of the GPU.
    ("olcf-user-docs/systems/frontier_user_guide.rst", "frontier002: task 0: Aborted"): (
        frozenset({"gpu-not-supported", "program-error"}), False, _ABORTED),
    ("olcf-user-docs/systems/frontier_user_guide.rst", "frontier129: task 0: Aborted"): (
        frozenset({"gpu-not-supported", "program-error"}), False, _ABORTED),
    # The launcher's own mistake.
    ("olcf-user-docs/systems/summit_user_guide.rst", "Signal: Segmentation fault"): (
        frozenset({"crashed"}), False, 139),
}  # fmt: skip


def _cases(
    directory: Path, truth: Mapping[tuple[str, str], Truth]
) -> Iterator[tuple[str, str, Truth]]:
    for (page, words), true in truth.items():
        if not (directory / page).exists():
            continue
        text = (directory / page).read_text(errors="replace")
        blocks = [*_FENCED.findall(text), *_INDENTED.findall(text)] or [text]
        block = next((each for each in blocks if words in each), None)
        if block is not None:
            yield f"{page}: {words}", textwrap.dedent(block), true  # as lists have it


SOURCES = (
    Source(
        name="bigscience",
        place="train/tr11-176B-ml/chronicles.md",
        anchor="all, by its authors",
        seen=False,
        score=lambda page: score_logs(_cases(page.parents[2], _CHRONICLES)),
    ),
    Source(
        name="ml-engineering",
        place="training/fault-tolerance/README.md",
        anchor="all, by its author",
        seen=False,
        score=lambda page: score_logs(_cases(page.parents[2], _HANDBOOK)),
    ),
    Source(
        name="cscs-docs",
        place="docs/software/communication/cray-mpich.md",
        anchor="all, by its authors",
        seen=False,
        score=lambda page: score_logs(_cases(page.parents[2], _CSCS)),
    ),
    Source(
        name="sites",
        place="support-docs/docs/Getting_Started",
        anchor="all, by their authors",
        seen=False,
        score=lambda place: score_logs(_cases(place.parents[2], _SITES)),
    ),
    Source(
        name="nccl",
        place=_GUIDE,
        anchor="all, by its authors",
        seen=False,
        score=lambda place: score_logs(_cases(place.parents[3], _NCCL)),
    ),
    Source(
        name="m4-logs",
        place="tr_141-hanging",
        anchor="all, by its authors",
        seen=False,
        score=lambda place: score_logs(_cases(place.parent, _M4)),
    ),
    Source(
        name="centres",
        place="scicomp-docs/triton/tut",
        anchor="all, by their authors",
        seen=False,
        score=lambda place: score_logs(_cases(place.parents[2], _CENTRES)),
    ),
)
