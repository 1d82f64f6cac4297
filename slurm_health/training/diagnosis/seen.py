# SPDX-License-Identifier: Apache-2.0
"""What the monitor beside a job sees of its ranks: what each does, and whether all stand still.

At the end: what is said of ranks, connections and places that were seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from slurm_health.records.text import listed, ranks_text
from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.pace import PATIENCE, HangPatience

STOPPED, IN_KERNEL, TRACED = "T", "D", "t"  # states of processes, as proc(5) names them
# What a process that only waits may use: threads that look after connections and logs.
IDLE_SHARE = 0.05
_IDLE_BYTES = 64 << 10
_BUSY_SHARE = 0.5
_OF_A_LIBRARY = ("site-packages/", "dist-packages/", "/lib/python", "<frozen", "<string>")
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_BACKWARD = "_engine_run_backward"
_LOADERS = ("torch/utils/data/",)
_COMPILERS = ("torch/_dynamo/", "torch/_inductor/", "torch/_functorch/", "triton/")
_CHECKPOINTS = ("torch/serialization.py", "torch/distributed/checkpoint/", "safetensors/")
# Where a checkpoint that is written waits for its device, and so for the collectives queued there.
_FROM_DEVICE = (("torch/storage.py", "cpu"), ("torch/cuda/streams.py", "synchronize"))
# Where Python's debuggers wait for somebody: pdb, and pydevd below the debuggers of editors.
_AT_A_PROMPT = {"interaction", "do_wait_suspend", "_do_wait_suspend"}
_DEBUGGERS = ("/pdb.py", "pydevd")
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
        unserved_share: of that time, in which its main thread was ready to run and did not.
        io_bytes: that they read and wrote meanwhile.
        gpu_share: of time in which their GPU was used, 0 where that is not known,
        gpu_waits: and it did next to nothing in it, as in a collective that waits for its peers.
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
    unserved_share: float = 0.0
    io_bytes: int = 0
    gpu_share: float = 0.0
    gpu_waits: bool = False
    answered: bool = False
    stack: tuple[Frame, ...] = ()

    @property
    def works(self) -> bool:
        """Whether it computes, reads or writes, or would if it had a processor."""
        if self.io_bytes > _IDLE_BYTES:
            return True
        if self.gpu_waits and not self._compiles:
            # Whoever waits for its GPU spins, and so do NCCL's threads that serve the network.
            return False
        return max(self.cpu_share, self.gpu_share) > IDLE_SHARE or self.lacks_processor

    @property
    def lacks_processor(self) -> bool:
        """Whether others have the processors that it needs, or a limit keeps it from them."""
        return self.unserved_share >= _BUSY_SHARE

    @property
    def is_beyond_script(self) -> bool:
        """Whether it waits in the kernel, as for storage, or for a GPU that is busy."""
        return self.state == IN_KERNEL or self.gpu_share >= _BUSY_SHARE

    @property
    def is_debugged(self) -> bool:
        """Whether somebody looks at it with a debugger, and holds it meanwhile."""
        return self.state == TRACED or any(
            frame.function in _AT_A_PROMPT and any(mark in frame.file for mark in _DEBUGGERS)
            for frame in self.stack
        )

    @property
    def _compiles(self) -> bool:
        """Whether it compiles kernels: that takes minutes, and a GPU may wait for it meanwhile."""
        return any(mark in frame.file for frame in self.stack for mark in _COMPILERS)


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


def cannot_be_well(standstill: Standstill) -> bool:
    """Tell whether something is seen that no start-up explains: not only that ranks wait.

    That is a rank that is stopped, and not all of them; data between nodes of the job that is not
    answered; a node that says nothing, while connections are broken.
    """
    stopped = [each for each in standstill.ranks if each.state == STOPPED and not each.gone]
    # What is not answered from outside the job is a user's that has left, not a rank's.
    within = any(path.peer in standstill.nodes for path in standstill.paths)
    silent = bool(standstill.paths and standstill.silent)
    return 0 < len(stopped) < len(standstill.ranks) or within or silent


def still_works(
    standstill: Standstill,
    waiting: Iterable[int],
    patience: HangPatience = PATIENCE,
    *,
    loading: Collection[int] = (),
) -> str:
    """Say which rank may still get on, so that this is no hang yet; empty where none does.

    `waiting` are the ranks that are known to wait for others, and may spin while they do. Where
    some wait, one that works keeps this from being a hang no longer than `patience.working_s`.
    `loading` are those that wait for their data loader.
    """
    debugged = [each for each in standstill.ranks if each.is_debugged and not each.gone]
    if debugged:
        return f"rank {debugged[0].rank} on {debugged[0].node} is held by a debugger"
    known = set(waiting)
    working = [each for each in standstill.ranks if each.works and each.rank not in known]
    patient = standstill.stalled_s < max(patience.working_s, 10 * standstill.allowance_s)
    if working and (patient or not known):
        first = working[0]
        does = "is ready to run, and has no processor" if first.lacks_processor else "still works"
        return f"rank {first.rank} on {first.node} {does}"
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
class StackPlace:
    """Where a rank is: `what` is the collective's name, `at` the deepest line of the user's."""

    doing: Doing
    what: str = ""
    at: str = ""


def place_of(stack: Sequence[Frame]) -> StackPlace:
    """Return where a stack is, outermost call first."""
    own = [each for each in stack if not any(mark in each.file for mark in _OF_A_LIBRARY)]
    at = f"{own[-1].file.rpartition('/')[2]}:{own[-1].line}" if own else ""
    if not stack:
        return StackPlace(doing=Doing.NOT_KNOWN)
    for frame in stack:
        if frame.file.endswith(_COLLECTIVES) and frame.function not in _NOT_NAMES:
            return StackPlace(doing=Doing.COLLECTIVE, what=frame.function, at=at)
        if frame.function == _BACKWARD:
            return StackPlace(doing=Doing.COLLECTIVE, what="backward", at=at)
    if any(mark in frame.file for frame in stack for mark in _CHECKPOINTS):
        of_device = any(_is_at(frame, *each) for frame in stack for each in _FROM_DEVICE)
        return StackPlace(doing=Doing.OWN_CODE if of_device else Doing.CHECKPOINT, at=at)
    if any(mark in frame.file for frame in stack for mark in _LOADERS):
        return StackPlace(doing=Doing.LOADING, at=at)
    return StackPlace(doing=Doing.OWN_CODE, at=at)


def _is_at(frame: Frame, file: str, function: str) -> bool:
    return frame.file.endswith(file) and frame.function == function


def loading_ranks(ranks: Iterable[RankSeen]) -> set[int]:
    """Return the ranks that wait for their data loader, by stack."""
    return {each.rank for each in ranks if place_of(each.stack).doing is Doing.LOADING}


def waiting_ranks(ranks: Iterable[RankSeen], flights: FlightRecords) -> set[int]:
    """Return the ranks that are known to wait in a collective, by stack or by Flight Recorder."""
    inside = {each.rank for each in ranks if place_of(each.stack).doing is Doing.COLLECTIVE}
    in_flight = {
        each.rank
        for each in flights.records
        if each.operations and each.operations[-1].state not in {"completed", "retired"}
    }
    return inside | in_flight


def shared_end(paths: Sequence[BrokenPath]) -> tuple[tuple[str, ...], str]:
    """Return the nodes of the broken paths, and what they tell: one node, where all lead to it."""
    ends = [{each.node, each.peer} for each in paths]
    if not ends:
        return (), ""
    shared = set.intersection(*ends)
    everyone = tuple(sorted(set.union(*ends)))
    if len(shared) == 1 and len(everyone) > 2:
        (node,) = shared
        return (node,), f"every broken connection leads to {node}"
    return everyone, "connections retransmit and get no answer"


def broken_line(path: BrokenPath) -> str:
    """Return what connections show of a path."""
    return (
        f"{path.node} gets no answer from {path.peer}: {path.connections} connections, up to"
        f" {path.retransmits} retransmissions"
    )


def gone_line(gone: RankSeen) -> str:
    """Return what is known of a rank that has ended."""
    if not gone.pid:
        return f"rank {gone.rank} has no process, and had none when the monitor began"
    return (
        f"process {gone.pid} of rank {gone.rank} on {gone.node} is gone; its last step was"
        f" {gone.step}"
    )


def where_line(seen: RankSeen, place: StackPlace) -> str:
    """Return where a rank is: its line, what it does, its process's state."""
    what = f" {place.what}" if place.what else ""
    at = f" at {place.at}" if place.at else ""
    state = f", state {seen.state}" if seen.state else ""
    kernel = f", {seen.kernel}" if seen.kernel else ""
    return f"rank {seen.rank} on {seen.node}{at}: {place.doing.value}{what}{state}{kernel}"


def ranks_of(seen: Iterable[RankSeen]) -> tuple[int, ...]:
    """Return their numbers, in order."""
    return tuple(sorted(each.rank for each in seen))


def nodes_of(seen: Iterable[RankSeen]) -> tuple[str, ...]:
    """Return their nodes that are known, in order."""
    return tuple(sorted({each.node for each in seen if each.node}))


def who(seen: Sequence[RankSeen]) -> str:
    """Return ranks and nodes."""
    nodes = nodes_of(seen)
    return ranks_text(ranks_of(seen)) + (f" on {listed(nodes)}" if nodes else "")


def have(seen: Sequence[RankSeen]) -> str:
    """Return the verb that goes with them."""
    return "has" if len(seen) == 1 else "have"
