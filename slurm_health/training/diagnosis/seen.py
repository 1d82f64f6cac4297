# SPDX-License-Identifier: Apache-2.0
"""What the monitor beside a job sees of its ranks, and whether that is a standstill."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from slurm_health.training.diagnosis.pace import PATIENCE, Patience

STOPPED, IN_KERNEL = "T", "D"  # states of processes, as proc(5) names them

# What a process that only waits may use: threads that look after connections and logs.
_IDLE_SHARE = 0.05
_IDLE_BYTES = 64 << 10


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
        pid: its process there, 0 of one that had ended before anybody looked.
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
    """TCP connections of the job between two nodes on which `node` sends again and again in vain.

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
