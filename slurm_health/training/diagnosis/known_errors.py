# SPDX-License-Identifier: Apache-2.0
"""Exceptions whose cause is known by their words. The first that fits counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from slurm_health.records.script_records import Attribution, Sureness
from slurm_health.training.diagnosis.last_words import OF_THE_PLACE, kind_of

_FIX = "correct the script; starting it again as it is fails again"
_NODE = (
    "leave the node out (sbatch --exclude, or --nodelist without it) and tell your administrator"
)


@dataclass(frozen=True, kw_only=True)
class KnownError:
    """An exception that is known by its words, what it means and what helps."""

    name: str
    pattern: re.Pattern[str]
    means: str
    advice: str
    attribution: Attribution
    sureness: Sureness = Sureness.LIKELY
    applies: Callable[[str], bool] = lambda _: True


# Process 1395 has 24.49 GiB memory in use. Including non-PyTorch memory, this process has 7.20 GiB
_IN_USE = re.compile(
    r"(?P<who>Process \d+|this process) has (?P<size>[\d.]+) (?P<unit>[KMG]iB) memory in use"
)
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _another_has_most(error: str) -> bool:
    """Tell whether PyTorch names a process that has more of the GPU's memory than this one has."""
    own = others = 0.0
    for match in _IN_USE.finditer(error):
        size = float(match["size"]) * _UNITS[match["unit"]]
        if match["who"] == "this process":
            own = size
        else:
            others += size
    return others > own


_BROKEN_CHECKPOINT = KnownError(
    name="checkpoint-broken",
    pattern=re.compile(
        r"PytorchStreamReader failed|failed finding central directory|pickle data was truncated"
        r"|invalid magic number; corrupt|Invalid magic number; corrupt|unpickling stack"
        r" underflow|SafetensorError|InvalidHeaderDeserialization|Ran out of input"
        r"|\bUnpicklingError|mmap can only be used with files saved with|No data left in file"
    ),
    means="a file that was to be loaded cannot be decoded: it was not written to its end, is"
    " something else, or holds what is not loaded unless one asks for it (weights_only)",
    advice="go on from an earlier checkpoint; " + _FIX,
    attribution=Attribution.USER,
)
# What torch.load says where a file was cut before what its beginning promises. It names no file,
# and says as much of other things elsewhere.
_ENDS_EARLY = re.compile(r"\[Errno 22\]|^(?:[\w.]+\.)?EOFError")
# The file that Python names behind an error of the system: people call theirs as they like.
_FILE = re.compile(r"""(\[Errno \d+\] [^:'"]+): (?:'[^']*'|"[^"]*")""")
_OF_FIGURES = frozenset({"not-a-number", "wrong-shape"})  # which files and modules do not cause

# Sources: PyTorch's and CUDA's own error texts, and NVIDIA's guide of Xid errors for what a lost
# GPU and an uncorrectable memory error mean.
KNOWN: tuple[KnownError, ...] = (
    KnownError(
        name="gpu-broken",
        pattern=re.compile(
            r"uncorrectable ECC|uncorrectable NVLink|GPU is lost|fallen off the bus"
        ),
        means="a GPU of the node failed",
        advice=_NODE,
        attribution=Attribution.NODE,
    ),
    KnownError(
        name="gpu-occupied",
        pattern=re.compile(r"CUDA out of memory|OutOfMemoryError"),
        applies=_another_has_most,
        means="the GPU's memory was used up, most of it by another process: one that an earlier job"
        " left there, another user's, or another rank on the same GPU",
        advice="see whose process that is (nvidia-smi on the node); if it is none of this job, try"
        " another node and tell your administrator",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="gpu-out-of-memory",
        pattern=re.compile(r"CUDA out of memory|OutOfMemoryError"),
        means="the GPU's memory was used up",
        advice="use a smaller batch or model part per GPU, or activation checkpointing",
        attribution=Attribution.USER,
    ),
    KnownError(
        name="gpu-out-of-memory",
        # What PyTorch asked for itself is told otherwise, with its size.
        pattern=re.compile(
            r"CUDA (?:driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
            r"|[Cc]uda failure (?:\d+ )?'out of memory'|Failed to CUDA c\w*alloc"
        ),
        means="CUDA found no memory on the GPU for work of its own: this program has used it up,"
        " another one on the same GPU has, or the GPU is broken",
        advice="look at what else uses the GPU (nvidia-smi); if it fails on one node only, have"
        " that node checked",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="device-assert",
        pattern=re.compile(r"device-side assert"),
        means="a check in a GPU kernel failed, most often an index out of range",
        advice="run it once with CUDA_LAUNCH_BLOCKING=1 to see the operation; " + _FIX,
        attribution=Attribution.USER,
    ),
    KnownError(
        name="illegal-access",
        pattern=re.compile(
            r"illegal memory access|misaligned address|illegal instruction|hardware stack error"
            r"|invalid program counter|invalid address space"
        ),
        means="a GPU kernel used memory that is not its own, or overran its stack: most often an"
        " error of the kernel",
        advice="run it once with CUDA_LAUNCH_BLOCKING=1; if it fails on one node only, have that"
        " node checked",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="launch-failure",
        pattern=re.compile(r"unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED"),
        means="a kernel failed on the GPU: it used memory of others, or the GPU is broken",
        advice="run it once with CUDA_LAUNCH_BLOCKING=1; if it fails on one node only, have that"
        " node checked",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="no-gpu",
        pattern=re.compile(
            r"No CUDA GPUs are available|no CUDA-capable device|CUDA unknown error"
            r"|CUDA-capable devices?(?:\(s\))? (?:is/)?are busy or unavailable"
            r"|Found no NVIDIA driver|device handle for GPU"
        ),
        means="the process could not use a GPU",
        advice="look at the GPUs that the job asked for, and have the node checked",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="driver-mismatch",
        pattern=re.compile(
            r"NVIDIA driver on your system is too old|driver (?:version )?is insufficient"
            r"|forward compatibility was attempted on non supported HW"
            r"|unsupported display driver / cuda driver combination"
            r"|[Dd]river/library version mismatch"
        ),
        means="the driver does not fit: this PyTorch was built for a newer CUDA than it supports,"
        " or the process found libraries of another version than the driver of its node",
        advice="compare the node's driver (nvidia-smi) with torch.version.cuda, and in a container"
        " what it brings of the driver's libraries; if one node alone says so, have it checked",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="gpu-unknown-error",
        pattern=re.compile(r"CUDA (?:driver )?error: unknown error|CUDA_ERROR_UNKNOWN"),
        means="CUDA met an error that it has no name for: a GPU or its driver has failed, or the"
        " program has broken its own context",
        advice="look for Xids of that time in the kernel's log of the node; if it fails on one node"
        " only, have that node checked",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="gpu-not-supported",
        pattern=re.compile(
            r"no kernel image is available|capability sm_\d+\w? is not compatible"
            r"|compiled with an unsupported toolchain|not compiled with CUDA enabled"
        ),
        means="this PyTorch, or an extension of it, was built without support for the node's GPUs",
        advice="install one that was built for them (torch.cuda.get_arch_list()), or ask for GPUs"
        " that it supports (--gres, --constraint)",
        attribution=Attribution.USER,
    ),
    KnownError(
        name="gpu-fabric",
        pattern=re.compile(r"CUDA error\W{1,3}802\b|SystemNotReady|system not yet initialized"),
        means="the driver had not set up the GPUs of the node: on machines with NVSwitch its fabric"
        " manager does that, and most likely it does not run",
        advice=_NODE,
        attribution=Attribution.NODE,
    ),
    KnownError(
        name="peer-access",
        pattern=re.compile(r"peer access (?:is )?(?:not supported|not enabled)|peer mapping"),
        means="a GPU cannot reach the memory of another one of its node",
        advice="look at how the node's GPUs are connected (nvidia-smi topo -p2p n), and have it"
        " checked",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="gpu-out-of-memory",
        pattern=re.compile(r"CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"),
        means="the GPU's memory was used up, as a library of it says",
        advice="use a smaller batch or model part per GPU, or activation checkpointing",
        attribution=Attribution.USER,
    ),
    KnownError(
        name="gpu-library-failed",
        pattern=re.compile(
            r"CU(?:BLAS|DNN|FFT|SOLVER)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR"
            r"|INVALID_VALUE)"
        ),
        means="a kernel of a GPU library failed: what it was given is wrong, libraries of several"
        " releases of CUDA are mixed, or the GPU is broken",
        advice="run it once with CUDA_LAUNCH_BLOCKING=1; if it fails on one node only, have that"
        " node checked",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="device-mismatch",
        pattern=re.compile(
            r"Expected all tensors to be on the same device"
            r"|Tensor on device \S{1,20} is not on the expected device"
        ),
        means="tensors of one operation are on different devices",
        advice="move them to one device (.to(device)); " + _FIX,
        attribution=Attribution.USER,
    ),
    _BROKEN_CHECKPOINT,  # before the words of files and shapes: what is read was never whole
    KnownError(
        name="mismatched-collective",
        pattern=re.compile(
            r"[Dd]etected mismatch between collectives|[Mm]ismatch between collective"
            r"|[Cc]ollectives? .{0,40}mismatch|op\.preamble\.length"
        ),
        means="ranks called different collectives, or the same one with different sizes",
        advice="have all ranks call the same collectives in the same order; " + _FIX,
        attribution=Attribution.USER,
        sureness=Sureness.CERTAIN,
    ),
    KnownError(
        name="wrong-type",
        pattern=re.compile(
            r"\b(?:to|must) have (?:the )?same dtype|expected scalar type \w+ but found"
            r"|Input type \(.{1,60}\) and (?:weight|bias) type"
        ),
        means="tensors of one operation have different types of numbers",
        advice="bring them to one type (.to(dtype), torch.autocast); " + _FIX,
        attribution=Attribution.USER,
    ),
    KnownError(
        name="wrong-shape",
        pattern=re.compile(
            r"shapes cannot be multiplied|size mismatch|must match the size of tensor"
            r"|mat1 and mat2|Expected [^/]{0,60}(size|shape|dimension)|shape '.*' is invalid"
            r"|Sizes of tensors must match|stack expects each tensor|inconsistent tensor size"
            r"|resize storage that is not resizable"
        ),
        means="a tensor has the wrong shape",
        advice="look at the batch that this rank got, and at the model's sizes; " + _FIX,
        attribution=Attribution.USER,
    ),
    KnownError(
        name="missing-key",
        pattern=re.compile(r"Error\(s\) in loading state_dict"),
        means="a checkpoint does not fit the model",
        advice="load a checkpoint of this model; " + _FIX,
        attribution=Attribution.USER,
    ),
    KnownError(
        name="shared-memory-full",  # of NCCL's, whose reason is that a disk is full
        pattern=re.compile(
            r"shared memory segment .{0,160}No space left on device"
            # Older ones tell no reason of this; of memory there is hardly another.
            r"|failed to extend /dev/shm/\S{1,80} to \d+ bytes(?!, error: (?!No space))"
        ),
        means="the shared memory of the node has no room for what its ranks exchange: in a"
        " container it often has 64 MB; elsewhere files that were left there may fill it",
        advice="give the container more (docker --shm-size or --ipc=host), or look at what lies in"
        " it (df, ls); starting it again as it is fails again",
        attribution=Attribution.USER,
    ),
    KnownError(
        name="shared-memory-removed",
        pattern=re.compile(r"unlink shared memory /dev/shm/nccl-.{1,80}No such file"),
        means="a file of NCCL's was removed from the node's shared memory: systemd does so"
        " when a user's last session ends, unless logind.conf says RemoveIPC=no",
        advice="tell your administrator which node it is (RemoveIPC in logind.conf)",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="disk-full",
        pattern=re.compile(r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]"),
        means="a filesystem that the script writes to is full, or its quota is used up",
        advice="free space or ask for more where the script writes; if that is the node's own"
        " disk, tell your administrator which node it is",
        attribution=Attribution.UNDECIDED,
        sureness=Sureness.CERTAIN,
    ),
    KnownError(
        name="disk-full",
        # What torch.save says where the kernel said ENOSPC: the reason itself is lost in it.
        pattern=re.compile(
            r"basic_ios::clear: iostream error|PytorchStreamWriter failed writing"
            r"|inline_container\.cc.*unexpected pos"
        ),
        means="torch could not write a file to its end: most likely its filesystem is full, or a"
        " quota is used up",
        advice="look at the space where checkpoints go, on this node (df); if that is the node's"
        " own disk, tell your administrator which node it is",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="filesystem-failed",
        pattern=re.compile(
            r"Input/output error|Stale file handle|Transport endpoint is not connected"
            r"|Read-only file system|\[Errno (5|30|107|116)\]"
        ),
        means="a filesystem failed while the script used it",
        advice="check whether the path can be read on other nodes, and have the node checked",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="shared-memory-full",
        pattern=re.compile(r"insufficient shared memory|DataLoader worker.*Bus error"),
        means="the shared memory of the node is too small for the data loader",
        advice="use fewer data loader workers, or have /dev/shm enlarged",
        attribution=Attribution.USER,
    ),
    KnownError(
        name="locked-memory-limit",  # whose reason is that there is no memory
        pattern=re.compile(
            r"Call to ibv_(?:reg_\w+|create_\w+) failed.{0,80}Cannot allocate memory"
        ),
        means="an adapter of InfiniBand or RoCE could not lock memory: most often the limit of the"
        " job's processes is low (ulimit -l)",
        advice="look at `ulimit -l` in a step on that node: it should say unlimited, which slurmd's"
        " own limit and PropagateResourceLimitsExcept=MEMLOCK decide",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="host-out-of-memory",
        pattern=re.compile(r"DataLoader worker .*is killed by signal: Killed"),
        means="a process of the data loader was killed from outside, most often because the job's"
        " memory on this node was used up",
        advice="ask for more memory (--mem), or use fewer data loader workers",
        attribution=Attribution.USER,
        sureness=Sureness.POSSIBLE,
    ),
    KnownError(
        name="host-out-of-memory",
        pattern=re.compile(
            r"^(?:[\w.]*\._?\w*)?MemoryError|[Cc]annot allocate memory|bad_alloc|\[Errno 12\]"
        ),
        means="the process got no more memory from its node",
        advice="ask for more memory (--mem), or use less of it per node",
        attribution=Attribution.USER,
    ),
    KnownError(
        name="port-in-use",
        pattern=re.compile(r"[Aa]ddress already in use|EADDRINUSE"),
        means="the port where ranks were to meet was in use",
        advice="start again; choose MASTER_PORT by the job's id",
        attribution=Attribution.TRANSIENT,
    ),
    KnownError(
        name="network-plugin-missing",
        pattern=re.compile(r"(?:(?<!\w)Error: |WARN )network .{1,60} not found\.?"),
        means="NCCL was told to use a network (NCCL_NET) that no plugin that it found provides",
        advice="load the plugin's module or container hook, or correct NCCL_NET and"
        " NCCL_NET_PLUGIN; NCCL_DEBUG=INFO says which it looked for",
        attribution=Attribution.USER,
    ),
    KnownError(
        name="network-plugin-missing",  # or, since 2.27, the adapters of a plugin that is built in
        pattern=re.compile(r"Failed to initialize any NET plugin"),
        means="NCCL cannot use the network that it was told to (NCCL_NET): no plugin that it found"
        " has that name, or the node has no adapter for it",
        advice="load the plugin's module or container hook, or correct NCCL_NET and"
        " NCCL_NET_PLUGIN; if one node alone says so, have its adapters checked",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="network-interface-missing",
        pattern=re.compile(r"no socket interface found|with family \d+ is neither AF_INET"),
        means="NCCL found no network interface for its ranks to meet by: NCCL_SOCKET_IFNAME names"
        " one that does not exist or is down, or there is none",
        advice="correct NCCL_SOCKET_IFNAME, or leave it out; if one node alone says so, look at its"
        " interfaces (ip -br address)",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="duplicate-gpu",
        pattern=re.compile(r"Duplicate GPU detected|ncclInvalidUsage|invalid usage"),
        means="ranks were given the same GPU, or NCCL was called wrongly",
        advice="give each rank a GPU of its own (torch.cuda.set_device(LOCAL_RANK)); " + _FIX,
        attribution=Attribution.USER,
    ),
    KnownError(
        name="container-not-started",
        pattern=re.compile(
            r"pyxis: (?:container start failed|couldn't start container|failed to import)"
            r"|spank_pyxis\.so: task_init\(\) failed"
            r"|FATAL: .{0,40}container creation failed"
        ),
        means="the container of the job could not be started: its image does not fit the site's"
        " hooks, or the node lacks something, such as the user's account",
        advice="read what the container's own log says after it; if other nodes start it, tell"
        " your administrator which node does not",
        attribution=Attribution.UNDECIDED,
    ),
    KnownError(
        name="not-a-number",
        # No part of a path or of a host's name, unlike `NaN/Inf`, `-inf` and the end of a sentence.
        pattern=re.compile(
            r"(?<![/\w.-])[-+]?(?:NaN|nan|Inf|inf)(?:/(?:NaN|nan|Inf|inf))?(?![/\w-]|\.\w|:\d)"
            r"|\bNaN-[a-z]|\b(?:non-finite|not finite)\b"
        ),
        means="the training computed NaN or infinity, and the script noticed",
        advice="look at the data, the learning rate and the loss scale; go on from a checkpoint"
        " before it",
        attribution=Attribution.USER,
    ),
)


def known(error: str, *, loading: bool = False) -> KnownError | None:
    """Return what is known of an exception, by its words; `loading`: `torch.load` raised it."""
    if loading and _ENDS_EARLY.search(error):
        return _BROKEN_CHECKPOINT
    said, never = _FILE.sub(r"\1", error), _OF_FIGURES if kind_of(error) in OF_THE_PLACE else ()
    fitting = (
        row
        for row in KNOWN
        if row.name not in never and row.pattern.search(said) and row.applies(error)
    )
    return next(fitting, None)
