# SPDX-License-Identifier: Apache-2.0
"""The causes that are played, and what should be said of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tests.played_gpu.description import Fault

RANKS = 4
RANKS_PER_NODE = 2
STEP = 12  # at which it happens: by then the training has a pace of its own
_VICTIM = 2  # the first rank of the second node, and of the pipeline's second stage


class Whose(Enum):
    """Who can do something about it."""

    USER = "user"
    NODE = "node"
    NOBODY = "nobody"  # what happened is known, why is not: a process that was killed or stopped


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause.

    Args:
        name: on the command line, in the table, and of the recording's directory.
        title: what is done.
        whose: to whom it may be laid.
        named: what may be said of it, by the names of inferences; the first fits best.
        ranks: which the words should show.
        training: `ddp`, `fsdp` or `pipeline`.
        device_fault: what breaks in a GPU of the second node, None where the script does it.
        hangs_mount: the filesystem of the second node's data answers no more.
        is_told: the driver writes of that into the kernel's log.
        hangs: ranks wait for each other until NCCL's watchdog ends them.
    """

    name: str
    title: str
    whose: Whose
    named: tuple[str, ...]
    ranks: tuple[int, ...] = (_VICTIM,)
    training: str = "ddp"
    device_fault: Fault | None = None
    hangs_mount: bool = False
    is_told: bool = False
    hangs: bool = True

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where its ranks run."""
        return tuple(sorted({node_of(rank) for rank in self.ranks}))

    @property
    def broken_node(self) -> str:
        """Where the GPU is that breaks."""
        return node_of(self.ranks[-1])


def node_of(rank: int) -> str:
    """Return where a rank runs."""
    return f"n{1 + rank // RANKS_PER_NODE}"


_ABSENT = ("never-entered", "rank-stopped")
_LOADER = ("data-loader-stuck", "never-entered")
_OWN = ("rank-elsewhere", "never-entered")
_GONE = ("rank-gone", "killed", "never-entered")
_MISMATCH = ("mismatched-collective",)
_NETWORK = ("network-of-group", "all-entered")
_GPU = ("gpu-broken", "gpu-error")


def _sticky(error: int) -> Fault:
    return Fault(device=0, kind="sticky_error", value=error)


CAUSES = (
    Cause(
        name="stopped",
        title="a rank is stopped (SIGSTOP)",
        whose=Whose.NOBODY,
        named=_ABSENT,
    ),
    Cause(
        name="loader",
        title="a rank waits in its data loader, the others in loss.item()",
        whose=Whose.NOBODY,
        named=_LOADER,
    ),
    Cause(
        name="loader-silent",
        title="the same without a heartbeat",
        whose=Whose.NOBODY,
        named=_LOADER,
    ),
    Cause(
        name="loader-synchronize",
        title="the same, the others in torch.cuda.synchronize()",
        whose=Whose.NOBODY,
        named=_LOADER,
    ),
    Cause(
        name="loader-clip",
        title="the same, the others in clip_grad_norm_()",
        whose=Whose.NOBODY,
        named=_LOADER,
    ),
    Cause(
        name="mount",
        title="a data loader reads from a mount that hangs (FUSE)",
        whose=Whose.NODE,
        named=_LOADER,
        hangs_mount=True,
    ),
    Cause(
        name="own-code",
        title="a rank sleeps in the script's own code",
        whose=Whose.NOBODY,
        named=_OWN,
    ),
    Cause(
        name="mismatch",
        title="a rank calls all_gather where the others call all_reduce",
        whose=Whose.USER,
        named=_MISMATCH,
    ),
    Cause(
        name="mismatched-size",
        title="a rank calls all_reduce with another size",
        whose=Whose.USER,
        named=_MISMATCH,
    ),
    Cause(
        name="behind",
        title="a rank ends a step before the others: its data is shorter",
        whose=Whose.USER,
        named=("rank-out-of-step", "mismatched-collective"),
    ),
    Cause(
        name="left-out",
        title="a rank leaves out a small all_reduce, and is one collective behind",
        whose=Whose.USER,
        named=("mismatched-collective", "rank-out-of-step"),
    ),
    Cause(
        name="gone",
        title="a rank ends with exit code 3 and says nothing",
        whose=Whose.USER,
        named=("exited", "rank-failed"),
        hangs=False,
    ),
    Cause(
        name="killed",
        title="a rank is killed (SIGKILL)",
        whose=Whose.NOBODY,
        named=_GONE,
        hangs=False,
    ),
    Cause(
        name="segfault",
        title="a rank has a segmentation fault",
        whose=Whose.NOBODY,
        named=("crashed", "segmentation-fault"),
        hangs=False,
    ),
    Cause(
        name="shape",
        title="a batch of the wrong shape on a rank",
        whose=Whose.USER,
        named=("wrong-shape",),
        hangs=False,
    ),
    Cause(
        name="nan",
        title="the assertion that the loss is a number fails on all ranks",
        whose=Whose.USER,
        named=("not-a-number",),
        ranks=(0, 1, 2, 3),
        hangs=False,
    ),
    Cause(
        name="memory",
        title="a rank's host memory is used up",
        whose=Whose.USER,
        named=("host-out-of-memory",),
        hangs=False,
    ),
    Cause(
        name="disk",
        title="no space is left for a rank's checkpoint",
        whose=Whose.NODE,
        named=("disk-full",),
        hangs=False,
    ),
    Cause(
        name="device-memory",
        title="a rank asks for more memory than its GPU has",
        whose=Whose.USER,
        named=("gpu-out-of-memory",),
        hangs=False,
    ),
    Cause(
        name="ecc",
        title="a GPU has an uncorrectable memory error",
        whose=Whose.NODE,
        named=_GPU,
        device_fault=_sticky(214),
        is_told=True,
        hangs=False,
    ),
    Cause(
        name="off-bus",
        title="a GPU falls off the bus",
        whose=Whose.NODE,
        named=_GPU,
        device_fault=Fault(device=0, kind="off_bus"),
        is_told=True,
        hangs=False,
    ),
    Cause(
        name="launch-failure",
        title="a kernel fails on a GPU (CUDA error 719)",
        whose=Whose.NOBODY,
        named=("launch-failure", "illegal-access"),
        device_fault=_sticky(719),
        hangs=False,
    ),
    Cause(
        name="kernel-hangs",
        title="a kernel on a GPU never ends",
        whose=Whose.NOBODY,
        named=(*_ABSENT, *_OWN),
        device_fault=Fault(device=0, kind="hang"),
    ),
    Cause(
        name="dead-link",
        title="all have entered a collective, and one rank's link passes nothing",
        whose=Whose.NODE,
        named=_NETWORK,
        ranks=(0, 1, 2, 3),
        device_fault=Fault(device=0, kind="link_slow", value=1e-9),
    ),
    Cause(
        name="link-breaks",
        title="one rank's connections break",
        whose=Whose.NODE,
        named=_NETWORK,
        device_fault=Fault(device=0, kind="link_drop"),
    ),
    Cause(
        name="nccl-error",
        title="NCCL of a rank returns an asynchronous error",
        whose=Whose.NODE,
        named=("nccl-failed", *_NETWORK),
        device_fault=Fault(device=0, kind="nccl_async_error", value=2),
    ),
    Cause(
        name="fsdp-stopped",
        title="FSDP: a rank is stopped (SIGSTOP)",
        whose=Whose.NOBODY,
        named=_ABSENT,
        training="fsdp",
    ),
    Cause(
        name="fsdp-loader",
        title="FSDP: a rank waits in its data loader",
        whose=Whose.NOBODY,
        named=_LOADER,
        training="fsdp",
    ),
    Cause(
        name="stage-stopped",
        title="pipeline: a rank of the second stage is stopped (SIGSTOP)",
        whose=Whose.NOBODY,
        named=_ABSENT,
        training="pipeline",
    ),
    Cause(
        name="stage-own-code",
        title="pipeline: a rank of the second stage sleeps in the script's own code",
        whose=Whose.NOBODY,
        named=_OWN,
        training="pipeline",
    ),
    Cause(
        name="stage-loader",
        title="pipeline: a rank of the first stage waits in its data loader",
        whose=Whose.NOBODY,
        named=_LOADER,
        ranks=(1,),
        training="pipeline",
    ),
)
BY_NAME = {cause.name: cause for cause in CAUSES}
