# SPDX-License-Identifier: Apache-2.0
"""What the monitor beside a job sees of its ranks: what each does, and whether all stand still."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from slurm_health.training.diagnosis.pace import PATIENCE, Patience

STOPPED, IN_KERNEL = "T", "D"  # states of processes, as proc(5) names them

# What a process that only waits may use: threads that look after connections and logs.
_IDLE_SHARE = 0.05
_IDLE_BYTES = 64 << 10
_OF_A_LIBRARY = ("site-packages/", "dist-packages/", "/lib/python", "<frozen", "<string>")
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_BACKWARD = "_engine_run_backward"
_LOADERS = ("torch/utils/data/",)
_CHECKPOINTS = ("torch/serialization.py", "torch/distributed/checkpoint/", "safetensors/")
_NOT_NAMES = frozenset({"wrapper", "_wait", "wait"})


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One call in a stack."""

    file: str
    line: int
    function: str


class RankSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One rank while the training stands still.

    Args:
        rank: its number.
        node: where it runs, empty where that is not known.
        pid: its process there, 0 of one that had ended before the first look.
        step: at which it is, by its heartbeat.
        batches: that its data has given so far, 0 where it does not tell.
        data_ended: its data has no more.
        gone: its process has ended.
        state: of its main thread, one letter of proc(5).
        kernel: where in the kernel it waits, and what its children do, where that can be seen.
        cpu_share: of one core, of it and its children while it was looked at.
        io_bytes: that they read and wrote meanwhile.
        gpu_share: of time in which their GPU computed, 0 where that is not known.
        answered: whether it said where it is.
        stack: where its main thread is, outermost call first.
    """

    rank: int
    node: str
    pid: int = 0
    step: int = 0
    batches: int = 0
    data_ended: bool = False
    gone: bool = False
    state: str = ""
    kernel: str = ""
    cpu_share: float = 0.0
    io_bytes: int = 0
    gpu_share: float = 0.0
    answered: bool = False
    stack: tuple[Frame, ...] = ()

    @property
    def works(self) -> bool:
        """Whether it computes, reads or writes."""
        computes = max(self.cpu_share, self.gpu_share) > _IDLE_SHARE
        return computes or self.io_bytes > _IDLE_BYTES


class BrokenPath(msgspec.Struct, frozen=True, kw_only=True):
    """TCP connections of the job between two nodes on which `node` retransmits and gets no answer.

    `peer` is a node, or an address that no node of the job told as its own.
    """

    node: str
    peer: str
    connections: int = 1
    retransmits: int = 0


class Standstill(msgspec.Struct, frozen=True, kw_only=True):
    """A training that makes no progress: all of its ranks, since when, and at which step.

    `silent` are the nodes of the job whose monitor does not answer any more. `not_seen` says what
    could not be looked at, and why.
    """

    stalled_s: float
    allowance_s: float
    step: int
    nodes: tuple[str, ...] = ()
    ranks: tuple[RankSeen, ...] = ()
    paths: tuple[BrokenPath, ...] = ()
    silent: tuple[str, ...] = ()
    not_seen: dict[str, str] = {}


def still_works(
    standstill: Standstill,
    waiting: Iterable[int],
    patience: Patience = PATIENCE,
    *,
    loading: Collection[int] = (),
) -> str:
    """Say which rank may still get on, so that this is no hang yet; empty where none does.

    `waiting` are the ranks that are known to wait for others, and may spin while they do. Where
    some wait, one that works keeps this from being a hang no longer than `patience.working_s`.
    `loading` are those that wait for their data loader.
    """
    known = set(waiting)
    working = [each for each in standstill.ranks if each.works and each.rank not in known]
    patient = standstill.stalled_s < max(patience.working_s, 10 * standstill.allowance_s)
    if working and (patient or not known):
        return f"rank {working[0].rank} on {working[0].node} still works"
    if any(each.gone for each in standstill.ranks) and not known:
        return "some ranks have ended, and no other is known to wait for them"
    for each in standstill.ranks:
        limit_s = patience.reading_s if each.rank in loading else patience.storage_s
        if each.state == IN_KERNEL and standstill.stalled_s < max(limit_s, standstill.allowance_s):
            return f"rank {each.rank} on {each.node} waits for storage or a device"
    return ""


def paths_by_node(
    found: Mapping[str, Sequence[tuple[str, int]]], addresses: Mapping[str, str]
) -> tuple[BrokenPath, ...]:
    """Return broken paths by the names of nodes.

    Args:
        found: of each node, per connection the address at its other end and how often was sent
            again.
        addresses: whose an address is.
    """
    sums: dict[tuple[str, str], list[int]] = {}
    for node, connections in found.items():
        for address, retransmits in connections:
            sums.setdefault((node, addresses.get(address, address)), []).append(retransmits)
    return tuple(
        BrokenPath(node=node, peer=peer, connections=len(times), retransmits=max(times))
        for (node, peer), times in sorted(sums.items())
    )


class Doing(Enum):
    """What a rank does, in words."""

    COLLECTIVE = "in a collective"
    LOADING = "waits for its data loader"
    CHECKPOINT = "writes or reads a checkpoint"
    OWN_CODE = "is in code of its own"
    NOT_KNOWN = "does not say where it is"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is: `what` is the collective's name, `at` the deepest line of the user's."""

    doing: Doing
    what: str = ""
    at: str = ""


def place_of(stack: Sequence[Frame]) -> Place:
    """Return where a stack is, outermost call first."""
    own = [each for each in stack if not any(mark in each.file for mark in _OF_A_LIBRARY)]
    at = f"{own[-1].file.rpartition('/')[2]}:{own[-1].line}" if own else ""
    if not stack:
        return Place(doing=Doing.NOT_KNOWN)
    for frame in stack:
        if frame.file.endswith(_COLLECTIVES) and frame.function not in _NOT_NAMES:
            return Place(doing=Doing.COLLECTIVE, what=frame.function, at=at)
        if frame.function == _BACKWARD:
            return Place(doing=Doing.COLLECTIVE, what="backward", at=at)
    for doing, files in ((Doing.CHECKPOINT, _CHECKPOINTS), (Doing.LOADING, _LOADERS)):
        if any(mark in frame.file for frame in stack for mark in files):
            return Place(doing=doing, at=at)
    return Place(doing=Doing.OWN_CODE, at=at)
