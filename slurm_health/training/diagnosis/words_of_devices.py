# SPDX-License-Identifier: Apache-2.0
"""From words to causes: the rows for exceptions about GPUs and their drivers.

Sources are the texts of PyTorch, CUDA and NCCL, and NVIDIA's guide of Xid errors for lost GPUs and
uncorrectable memory errors.
"""

from __future__ import annotations

import re

from slurm_health.training.diagnosis.rows import On, Row
from slurm_health.training.framework import Attribution

_USER, _NODE, _UNDECIDED = Attribution.USER, Attribution.NODE, Attribution.UNDECIDED
FIX = "correct the script; starting it again as it is fails again"
LEAVE = (
    "leave the node out (sbatch --exclude, or --nodelist without it) and tell your administrator"
)
BLOCKING = (
    "run it once with CUDA_LAUNCH_BLOCKING=1 (ROCm: AMD_SERIALIZE_KERNEL=3); if it fails on one"
    " node only, have that node checked"
)

# Of PyTorch's sentence about a full GPU, in the order of its releases:
# GPU 0 has a total capacity of 79.15 GiB of which 1.20 GiB is free. Process 1395 has 24.49 GiB
# memory in use. Including non-PyTorch memory, this process has 7.20 GiB memory in use.
# (GPU 0; 79.15 GiB total capacity; 5.00 GiB already allocated; 1.20 GiB free; 7.20 GiB reserved in
# total by PyTorch)
_SIZE = r"(?P<size>[\d.]+) (?P<unit>[KMG]iB)"
_IN_USE = {
    "total": re.compile(rf"total capacity of {_SIZE}|(?<=; ){_SIZE.replace('<', '<_')} total cap"),
    "free": re.compile(rf"of which {_SIZE} is free|(?<=; ){_SIZE.replace('<', '<_')} free"),
    "own": re.compile(
        rf"this process has {_SIZE} memory in use|(?<=; ){_SIZE.replace('<', '<_')} reserved"
    ),
    "others": re.compile(rf"Process \d+ has {_SIZE} memory in use"),
}
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _this_process_has_most(error: str) -> bool:
    """Return whether this process has most of the GPU's memory in use, by PyTorch's figures.

    PyTorch does not name the other processes if a container hides them: they have the rest.
    """

    def bytes_of(what: str) -> float:
        sizes = (match.groupdict("") for match in _IN_USE[what].finditer(error))
        pairs = (
            (named["size"] or named["_size"], named["unit"] or named["_unit"]) for named in sizes
        )
        return sum(float(size) * _UNITS[unit] for size, unit in pairs)

    own = bytes_of("own")
    rest = bytes_of("total") - bytes_of("free") - own if own else 0.0
    return max(bytes_of("others"), rest) <= own


_OUT_OF_GPU_MEMORY = "use a smaller batch or model part per GPU, or activation checkpointing"

DEVICES: tuple[Row, ...] = (
    Row(
        "gpu-broken",
        r"uncorrectable ECC|ECC_UNCORRECTABLE|uncorrectable NVLink|GPU is lost|fallen off the bus"
        r"|device handle for GPU.{1,40}Unknown Error",  # nvidia-smi's words for a lost one
        "a GPU of the node failed",
        LEAVE,
        _NODE,
        on=On.LAST_WORDS | On.CRASH,
    ),
    Row(
        "gpu-occupied",
        r"CUDA out of memory|OutOfMemoryError",
        "the GPU's memory was used up, most of it by another process: one that an earlier job"
        " left there, another user's, or another rank on the same GPU",
        "see whose process that is (nvidia-smi on the node); if it is none of this job, try"
        " another node and tell your administrator",
        unless=_this_process_has_most,
    ),
    Row(
        "gpu-out-of-memory",
        r"CUDA out of memory|OutOfMemoryError: (?!.*node running low)"
        r"|RESOURCE_EXHAUSTED: Out of memory|OOM when allocating tensor"  # XLA, TensorFlow
        r"|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED",
        "the GPU's memory was used up",
        _OUT_OF_GPU_MEMORY,
        _USER,
    ),
    Row(
        "gpu-out-of-memory",
        # PyTorch's own allocations fail with other words, and their size.
        r"CUDA (?:driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|[Cc]uda failure (?:\d+ )?'out of memory'|Failed to CUDA c\w*alloc"
        r"|HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        "CUDA or ROCm got no memory on the GPU for work of its own: this program or another one on"
        " the same GPU has used it up, or the GPU is broken",
        "look at what else uses the GPU (nvidia-smi, amd-smi); if it fails on one node only, have"
        " that node checked",
        on=On.CRASH,
    ),
    Row(
        "device-assert",
        r"device-side assert|: block: \[[\d,]+\], thread: \[[\d,]+\] Assertion ",
        "a check in a GPU kernel failed, most often an index out of range",
        "run it once with CUDA_LAUNCH_BLOCKING=1 to see the operation; " + FIX,
        _USER,
        on=On.LAST_WORDS | On.CRASH,
    ),
    Row(
        "illegal-access",
        r"illegal memory access|misaligned address|illegal instruction|hardware stack error"
        r"|invalid program counter|invalid address space|Memory access fault by GPU",
        "a GPU kernel used memory that is not its own, or overran its stack: most often an"
        " error of the kernel",
        BLOCKING,
        on=On.LAST_WORDS | On.CRASH,
    ),
    Row(
        "launch-failure",
        r"unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED|access of peer GPU memory"
        r"|HSA_STATUS_ERROR_EXCEPTION",
        "a kernel failed on the GPU: it used memory that is not its own, or the GPU is broken",
        BLOCKING,
        on=On.LAST_WORDS | On.CRASH,
    ),
    Row(
        "no-such-gpu",
        r"invalid device ordinal|You requested gpu: \[|device >= 0 && device < num_gpus",
        "the program asked for a GPU by a number that its process does not have",
        "take the GPU by LOCAL_RANK, and ask for as many GPUs as there are ranks on a node"
        " (--gpus-per-node); starting it again as it is fails again",
        _USER,
    ),
    Row(
        "gpus-missing",
        r"(?:[Ee]xpect|[Rr]equire|[Nn]eed|[Ww]ant|[Aa]sk)\w* (?:at least )?\d+ GPUs?\b.{0,60}\b\d"
        r"|(?:[Oo]nly|[Ff]ound|[Gg]ot|[Hh]as|[Dd]etected) \d+ (?:visible |CUDA )?GPUs?\b",
        "the program counted fewer GPUs than it wants: the job asked for fewer, or the node has"
        " lost one",
        "compare the GPUs that the job asked for (--gpus-per-node) with those of the node"
        " (nvidia-smi -L); if other nodes have all of theirs, have this one checked",
        on=On.SHARED,
    ),
    Row(
        "gpu-fabric",
        r"(?:CUDA e|E)rror\W{1,3}802\b|SystemNotReady|SYSTEM_NOT_READY|system not yet initialized"
        r"|\(NVLS\) Multicast",  # NCCL
        "the driver had not set up the GPUs of the node, or NVLink between them: on machines with"
        " NVSwitch the fabric manager does that, and most likely it does not run or has failed",
        LEAVE,
        _NODE,
        on=On.LAST_WORDS,
    ),
    Row(
        "no-gpu",
        r"CUDA-capable devices?(?:\(s\))? (?:is/)?are busy or unavailable",
        "the GPU did not take the process: another process has it for itself (its compute mode),"
        " or it has failed and needs a reset",
        "see what uses it (nvidia-smi on the node); if it is none of this job, try another node and"
        " tell your administrator",
        on=On.LAST_WORDS,
    ),
    Row(
        "no-gpu",
        r"No CUDA GPUs are available|no CUDA-capable device|CUDA unknown error"
        r"|CUDA error: initialization error|CUDA driver initialization failed"
        r"|Found no NVIDIA driver|device handle for GPU|no GPUs found!|CUDA is not available"
        r"|AcceleratorError: .*no device|no supported devices found for platform"
        r"|couldn't communicate with the NVIDIA driver"
        r"|Failed to initialize NVML: (?!Driver/lib)",
        "the process could not use a GPU",
        "look at the GPUs that the job asked for (--gpus, --gres, CUDA_VISIBLE_DEVICES); if it has"
        " them on other nodes, have this node checked",
        on=On.LAST_WORDS | On.SHARED,
    ),
    Row(
        "no-nccl",
        r"Distributed package doesn't have NCCL built in|NCCL (?:backend )?(?:is )?not (?:built in"
        r"|available)|libnccl\.so[\w.]*: cannot open shared object",
        "this PyTorch has no NCCL, or does not find it",
        "install one that was built with NCCL, or use gloo; starting it again as it is fails again",
        _USER,
        on=On.LAST_WORDS,
    ),
    Row(
        "driver-mismatch",
        r"NVIDIA driver on your system is too old|driver (?:version )?is insufficient"
        r"|not supported in the installed CUDA driver|[Dd]river/library version mismatch"
        r"|forward compatibility was attempted on non supported HW"
        r"|unsupported display driver / cuda driver combination"
        r"|[Cc]uda failure (?:801 )?'operation not supported'",
        "the driver does not fit: this PyTorch was built for a newer CUDA than it supports, a"
        " virtual GPU lacks what it asks for, or the driver's libraries are of another release:"
        " those of a container, or of an update without a reboot",
        "compare the node's driver (/proc/driver/nvidia/version) with torch.version.cuda, and with"
        " the driver libraries of a container; if only one node fails so, tell your administrator:"
        " a reboot, or loading the new driver, repairs it",
        on=On.LAST_WORDS | On.SHARED,
    ),
    Row(
        "peer-access",
        r"peer access (?:is )?(?:not supported|not enabled)|peer mapping",
        "a GPU cannot reach the memory of another one of its node",
        "look at how the node's GPUs are connected (nvidia-smi topo -p2p n), and have it checked",
    ),
    Row(
        "gpu-unknown-error",
        r"CUDA (?:driver )?error: unknown error|CUDA_ERROR_UNKNOWN|unhandled cuda error"
        r"|HW Exception by GPU",
        "CUDA or HIP met an error without a name: a GPU or its driver has failed, or the program"
        " has broken its own context",
        "look for errors of the driver at that time in the kernel's log of the node (Xid, amdgpu);"
        " if it fails on one node only, have that node checked",
        on=On.LAST_WORDS | On.CRASH,
    ),
    Row(
        "gpu-not-supported",
        r"no kernel image is available|NoBinaryForGpu|capability sm_\d+\w? is not compatible"
        r"|compiled with an unsupported toolchain|not compiled with CUDA enabled"
        r"|error: invalid device function"
        r"|invalid value for --gpu-architecture|only supports Ampere|not support bfloat16"
        r"|Value 'sm_\w+' is not defined for option",
        "this PyTorch, or an extension of it, was built without support for the node's GPUs",
        "install one that was built for them (torch.cuda.get_arch_list()), or ask for GPUs"
        " that it supports (--gres, --constraint)",
        _USER,
        on=On.LAST_WORDS | On.CRASH,
    ),
    Row(
        "gpu-library-failed",
        r"CU(?:BLAS|DNN|FFT|SOLVER)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR"
        r"|INVALID_VALUE|NOT_INITIALIZED)",
        "a kernel of a GPU library failed: its input is wrong, libraries of several releases of"
        " CUDA are mixed, or the GPU is broken",
        BLOCKING,
        on=On.LAST_WORDS,
    ),
)
