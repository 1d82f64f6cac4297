# SPDX-License-Identifier: Apache-2.0
"""The reports of agents about the ranks on their nodes, and the standstill of a training.

A `RankSample` is one rank at one moment: its heartbeat, its processes in /proc, and after an
inspection also its place in the code. Agents are stateless: the `Pulse` compares consecutive
samples. A main thread that only waits wakes seldom and hardly runs; one that spins runs all the
time; one that polls wakes often and runs for little. None of this is progress.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

import msgspec

from slurm_health.records.text import listed, ranks_text
from slurm_health.training.diagnosis.collected import FlightRecord, NodeState

# States of processes, as proc(5) names them: that of one that runs, or would, first.
READY, STOPPED, IN_KERNEL, TRACED = "R", "T", "D", "t"
# The CPU share of a process that only waits: its threads serve connections and logs.
IDLE_SHARE = 0.05
IDLE_BYTES_PER_S = 16 << 10  # that a rank and its children read and write
_WAKES_PER_S = 0.5  # of a wait with a time limit
# Shares of time in which a main thread at rest runs, and on a starved node is ready to. One that
# polls does both for longer, and one that spins does not wait in the kernel.
_RESTS, _POLLS, _SPINS = (0.002, 0.05), (0.05, 0.3), 0.9
_BUSY_SHARE = 0.5
_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python", "<frozen", "<string>", ".so")
_MPI_CALL = re.compile(r"P?(MPI_[A-Z]\w+)")
_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_NO_COLLECTIVES = frozenset({"wrapper", "_wait", "wait"})
_MEETS = frozenset(
    {"init_process_group", "_store_based_barrier", "new_group", "split_group", "_rendezvous"}
)
_RENDEZVOUS = "torch/distributed/rendezvous.py"
# A torchrun waits here for those of the other nodes, before it starts its ranks.
_OF_TORCHRUN = ("torch/distributed/elastic/agent/server/api.py", "SimpleElasticAgent._rendezvous")
_BACKWARD = "_engine_run_backward"
_LOADERS = "torch/utils/data/"
_COMPILERS = ("torch/_dynamo/", "torch/_inductor/", "torch/_functorch/", "triton/")
_CHECKPOINTS = ("torch/serialization.py", "torch/distributed/checkpoint/", "safetensors/")
# The write of a checkpoint waits here for its device, and so for the collectives queued there.
_FROM_DEVICE = (("torch/storage.py", "cpu"), ("torch/cuda/streams.py", "synchronize"))
# Python's debuggers wait here for a person: pdb, and pydevd below the debuggers of editors.
_AT_A_PROMPT = frozenset({"interaction", "do_wait_suspend", "_do_wait_suspend"})
_DEBUGGERS = ("/pdb.py", "pydevd")
# Of these, the waits for a filesystem, which no idle process has.
_STORAGE = re.compile(r"fuse|request_wait_answer|nfs|rpc_wait|lustre|cl_|ldlm|ceph|gpfs|beegfs")
# Functions of the kernel in which a process waits for a file, a pipe or a filesystem. Ranks that
# wait for each other are in futexes, polls and sockets.
_FILES = re.compile(
    r"wait_for_partner|pipe_(?:read|wait)|fuse|request_wait_answer|nfs|rpc_wait|lustre|cl_(?:io|sync)"
    r"|ldlm|ceph|cxi|gpfs|beegfs|folio_wait|wait_on_page|io_schedule|flock|locks?_"
)


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One call in a stack."""

    file: str
    line: int
    function: str


class Doing(Enum):
    """The activity of a rank, in words."""

    COLLECTIVE = "in a collective"
    LOADING = "waits for its data loader"
    CHECKPOINT = "writes or reads a checkpoint"
    OWN_CODE = "is in code of its own"
    NOT_KNOWN = "does not say where it is"


@dataclass(frozen=True, kw_only=True)
class StackPlace:
    """A rank's place: `what` is the collective's name, `at` the deepest line of the user's."""

    doing: Doing
    what: str = ""
    at: str = ""

    @property
    def meets(self) -> bool:
        """Whether it waits for the other ranks to come to a rendezvous."""
        return self.what in _MEETS


def place_of(stack: Sequence[Frame]) -> StackPlace:
    """Return the place of a stack, outermost call first."""
    if not stack:
        return StackPlace(doing=Doing.NOT_KNOWN)
    own = [frame for frame in stack if not any(mark in frame.file for mark in _LIBRARIES)]
    at = f"{own[-1].file.rpartition('/')[2]}:{own[-1].line}" if own else ""
    for frame in stack:
        if frame.file.endswith(_COLLECTIVES) and frame.function not in _NO_COLLECTIVES:
            return StackPlace(doing=Doing.COLLECTIVE, what=frame.function, at=at)
        if (call := _MPI_CALL.fullmatch(frame.function)) and "libmpi" in frame.file:
            return StackPlace(doing=Doing.COLLECTIVE, what=call[1], at=at)
        if frame.function == _BACKWARD:
            return StackPlace(doing=Doing.COLLECTIVE, what="backward", at=at)
        if frame.file.endswith(_RENDEZVOUS):
            return StackPlace(doing=Doing.COLLECTIVE, what="init_process_group", at=at)
        # Python before 3.11 does not name the class of a method.
        if frame.file.endswith(_OF_TORCHRUN[0]) and _OF_TORCHRUN[1].endswith(frame.function):
            return StackPlace(doing=Doing.COLLECTIVE, what="_rendezvous", at=at)
    if any(mark in frame.file for frame in stack for mark in _CHECKPOINTS):
        of_device = any(
            frame.file.endswith(file) and frame.function == function
            for frame in stack
            for file, function in _FROM_DEVICE
        )
        return StackPlace(doing=Doing.OWN_CODE if of_device else Doing.CHECKPOINT, at=at)
    if any(_LOADERS in frame.file for frame in stack):
        return StackPlace(doing=Doing.LOADING, at=at)
    return StackPlace(doing=Doing.OWN_CODE, at=at)


def file_waits(kernel: str) -> frozenset[str]:
    """Return those waits in the kernel that are for a file, a pipe or a filesystem."""
    return frozenset(wait for wait in kernel.split(", ") if _FILES.search(wait))


# Behind the step, the `program` of torchruns that have not started their ranks.
LAUNCHERS = " torchrun"


class RankSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank at one moment; unknown values are 0, empty, or -1 for `replica`.

    Args:
        rank: its number; `world` is the number of ranks, `meets` the address of their rendezvous.
        node: its node.
        program: the step of the job that it belongs to, or the job's script itself. A torchrun
            that has not started its ranks is one of `STEP torchrun`, numbered by its task.
        pid: its process there, 0 of a rank that ended before it was ever sampled.
        gone: its process has ended.
        step: its current one, by its heartbeat; `steps` counts them, the latest was `age_s` ago.
        typical_s: the usual time of a step; `longest_s` is the longest pause between two.
        own_s: seconds of its own in `own_steps` steps, `loading_s` of them for its data, which has
            given `batches`; `data_ended`: there are no more.
        tokens: those it has computed; ranks with the same `role` do the same part of the model, and
            those of one `replica` have the same data.
        state: of its main thread, one letter of proc(5), which ran for `ran_s`, was ready to for
            `unserved_s` without a processor, and went to wait `wakes` times.
        cpu_s: of the process and its children, which read and wrote `io_bytes`; with the time for
            which these were ready to run without a processor.
        throttled_s: the time for which a CPU limit held its cgroup back.
        answered: it answered an inspection, which the following are of.
        stack: of its main thread, outermost call first.
        kernel: the waits in the kernel of it and its children.
        storage: the file with its server that it reads or writes, if it waits for a file.
        flight: its recorded collectives.
        gpu_share: of time in which its GPUs were used; with `gpu_waits` they did next to nothing
            in it, as in a collective that waits for its peers.
        cpu_share: `cpu_s` of one core, since the sample before; `unserved_share` of that time its
            main thread lacked a processor, and `moved_bytes` were read and written.
        rests: its main thread has not run since then; `polls`: it came back for little.
    """

    rank: int
    node: str = ""
    program: str = ""
    pid: int = 0
    world: int = 0
    meets: str = ""
    gone: bool = False
    step: int = 0
    steps: int = 0
    age_s: float = 0.0
    typical_s: float = 0.0
    longest_s: float = 0.0
    own_s: float = 0.0
    own_steps: int = 0
    loading_s: float = 0.0
    batches: int = 0
    data_ended: bool = False
    tokens: float = 0.0
    role: str = ""
    replica: int = -1
    state: str = ""
    ran_s: float = 0.0
    unserved_s: float = 0.0
    wakes: int = 0
    cpu_s: float = 0.0
    io_bytes: int = 0
    throttled_s: float = 0.0
    answered: bool = False
    stack: tuple[Frame, ...] = ()
    kernel: str = ""
    storage: str = ""
    flight: FlightRecord | None = None
    gpu_share: float = 0.0
    gpu_waits: bool = False
    cpu_share: float = 0.0
    unserved_share: float = 0.0
    moved_bytes: int = 0
    rests: bool = False
    polls: bool = False

    def since(self, before: RankSample, window_s: float) -> RankSample:
        """Return this sample with the activity in the `window_s` since an earlier one."""
        ran = (self.ran_s - before.ran_s) / window_s
        ready = (self.unserved_s - before.unserved_s) / window_s
        # A child that has ended takes its figures along.
        moved_bytes = abs(self.io_bytes - before.io_bytes)
        seldom = self.wakes - before.wakes <= _WAKES_PER_S * window_s
        spins = seldom and ran + ready >= _SPINS
        if seldom and not spins and self.state == READY:
            ready = 1 - ran  # the kernel counts a wait for a processor once it is over
        most_ran, most_ready = _RESTS if seldom else _POLLS
        waits = ran <= most_ran and ready <= most_ready
        idle = self.steps == before.steps and moved_bytes <= IDLE_BYTES_PER_S * window_s
        # A rank that has moved to another place does not rest, whatever the kernel has counted.
        idle &= not (before.stack and self.stack) or before.place == self.place
        return msgspec.structs.replace(
            self,
            cpu_share=round(abs(self.cpu_s - before.cpu_s) / window_s, 3),
            unserved_share=round(ready, 3),
            moved_bytes=moved_bytes,
            rests=idle and (spins or waits),
            polls=idle and waits and not seldom,
        )

    def is_still(self, before: RankSample, window_s: float) -> bool:
        """Whether neither its main thread nor anything beside it worked since an earlier sample."""
        beside_s = self.cpu_s - before.cpu_s - (self.ran_s - before.ran_s)
        return self.rests and abs(beside_s) <= IDLE_SHARE * window_s

    @property
    def launches(self) -> bool:
        """Whether it is a torchrun that has not started its ranks."""
        return self.program.endswith(LAUNCHERS)

    @property
    def works(self) -> bool:
        """Whether it computes, reads or writes, or would if it had a processor."""
        if self.moved_bytes > 4 * IDLE_BYTES_PER_S:
            return True
        if self.gpu_waits and not self.compiles:
            # A rank that waits for its GPU spins, and so do NCCL's threads that serve the network.
            return False
        return max(self.cpu_share, self.gpu_share) > IDLE_SHARE or self.lacks_processor

    @property
    def lacks_processor(self) -> bool:
        """Whether others use its processors, or a limit keeps it from them."""
        return self.unserved_share >= _BUSY_SHARE

    @property
    def compiles(self) -> bool:
        """Whether it compiles kernels, which takes minutes while a GPU may wait."""
        return any(mark in frame.file for frame in self.stack for mark in _COMPILERS)

    @property
    def is_beyond_script(self) -> bool:
        """Whether it waits in the kernel, as for storage, or for a GPU that is busy."""
        return self.state == IN_KERNEL or self.gpu_share >= _BUSY_SHARE

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger holds it."""
        return self.state == TRACED or any(
            frame.function in _AT_A_PROMPT and any(mark in frame.file for mark in _DEBUGGERS)
            for frame in self.stack
        )

    @property
    def file_waits(self) -> frozenset[str]:
        """Its waits in the kernel, and its children's, for a file, a pipe or a filesystem."""
        return file_waits(self.kernel)

    @property
    def awaits_storage(self) -> bool:
        """Whether it or a child waits for a filesystem."""
        return bool(_STORAGE.search(self.kernel))

    @property
    def in_flight(self) -> bool:
        """Whether its Flight Recorder shows a collective that is not over."""
        operations = self.flight.operations if self.flight else ()
        return bool(operations) and not operations[-1].is_over

    @property
    def place(self) -> StackPlace:
        """Its place, by its stack."""
        return place_of(self.stack)


class Look(StrEnum):
    """The purpose of a report."""

    SAMPLE = ""
    # The ranks have just worked to answer questions: the next sample is compared with this one.
    BASELINE = "baseline"
    INSPECTION = "inspection"  # the ranks were sampled before they were asked


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An agent's message: the ranks on its node, and on request their places and the node's state.

    Args:
        node: its name.
        at_s: when the ranks were sampled, by the node's own clock.
        ranks: samples of all of them.
        look: its purpose; the following come with an inspection.
        addresses: this node's own.
        broken: the peer's address and the retransmissions of connections with unanswered data.
        sent: by address, the bytes sent so far, and the seconds that this took.
        received: the bytes received so far.
        unavailable: by name, what could not be read, and why.
        state: the state of the node, on request.
        reached: the addresses that answered it, on request.
    """

    node: str
    at_s: float = 0.0
    ranks: tuple[RankSample, ...] = ()
    look: Look = Look.SAMPLE
    addresses: tuple[str, ...] = ()
    broken: tuple[tuple[str, int], ...] = ()
    sent: dict[str, tuple[int, float]] = {}
    received: int = 0
    unavailable: dict[str, str] = {}
    state: NodeState | None = None
    reached: tuple[str, ...] | None = None


def ranks_of(ranks: Iterable[RankSample]) -> tuple[int, ...]:
    """Return their numbers, in order."""
    return tuple(sorted(rank.rank for rank in ranks))


def nodes_of(ranks: Iterable[RankSample]) -> tuple[str, ...]:
    """Return their known nodes, in order."""
    return tuple(sorted({rank.node for rank in ranks if rank.node}))


def who(ranks: Sequence[RankSample]) -> str:
    """Return ranks and nodes."""
    nodes = nodes_of(ranks)
    names = "torchrun" if ranks and ranks[0].launches else ranks_text(ranks_of(ranks))
    return names + (f" on {listed(nodes)}" if nodes else "")


def where_line(rank: RankSample, place: StackPlace) -> str:
    """Return the place of a rank: its line, its activity, its process's state."""
    what = f" {place.what}" if place.what else ""
    at = f" at {place.at}" if place.at else ""
    state = f", state {rank.state}" if rank.state else ""
    kernel = f", {rank.kernel}" if rank.kernel else ""
    return f"{who((rank,))}{at}: {place.doing.value}{what}{state}{kernel}"


class BrokenPath(msgspec.Struct, frozen=True, kw_only=True):
    """TCP connections of the job between two nodes on which `node` retransmits without an answer.

    `peer` is a node, or an address that no node of the job has.
    """

    node: str
    peer: str
    connections: int = 1
    retransmits: int = 0


class Standstill(msgspec.Struct, frozen=True, kw_only=True):
    """A training without progress: all of its ranks, since when, and at which step.

    Args:
        stalled_s: its duration; a pause of `allowance_s` would be usual.
        step: the last one, 0 if unknown.
        line: the last line of output that counted steps, if output alone shows the standstill.
        at_rest: the ranks' main threads show it.
        nodes: those of the job.
        ranks: all of them.
        paths: connections that do not get through.
        reached: by a third node that tried the ends of these, those that answered it.
        silent: nodes whose agent does not answer.
        unavailable: by name, what could not be read, and why.
        why_not: why this may be no hang, empty if it is one.
    """

    stalled_s: float
    allowance_s: float
    step: int = 0
    line: str = ""
    at_rest: bool = False
    nodes: tuple[str, ...] = ()
    ranks: tuple[RankSample, ...] = ()
    paths: tuple[BrokenPath, ...] = ()
    reached: dict[str, tuple[str, ...]] = {}
    silent: tuple[str, ...] = ()
    unavailable: dict[str, str] = {}
    why_not: str = ""

    @property
    def stopped(self) -> tuple[RankSample, ...]:
        """The ranks that a signal has stopped."""
        return tuple(rank for rank in self.ranks if rank.state == STOPPED and not rank.gone)

    @property
    def waiting(self) -> frozenset[int]:
        """The ranks known to wait in a collective, by stack or by Flight Recorder."""
        return frozenset(
            rank.rank
            for rank in self.ranks
            if rank.place.doing is Doing.COLLECTIVE or rank.in_flight
        )

    @property
    def is_cut(self) -> bool:
        """Whether data between nodes of the job is not answered.

        A broken connection to a peer outside the job is a user's that has left, not a rank's; but
        the addresses of a silent node are not known.
        """
        return any(path.peer in self.nodes for path in self.paths) or bool(
            self.paths and self.silent
        )

    @property
    def is_definitely_hung(self) -> bool:
        """Whether there is evidence that no start or pause explains: not only waits of ranks.

        Such is a stopped rank, if not all are stopped, or data that is not answered.
        """
        return 0 < len(self.stopped) < len(self.ranks) or self.is_cut


def paths_between(reports: Mapping[str, NodeReport]) -> tuple[BrokenPath, ...]:
    """Return the broken paths in reports, with the names of both ends."""
    owners = {address: node for node, report in reports.items() for address in report.addresses}
    paths: dict[tuple[str, str], list[int]] = {}
    for node, report in reports.items():
        for address, retransmits in report.broken:
            paths.setdefault((node, owners.get(address, address)), []).append(retransmits)
    return tuple(
        BrokenPath(node=node, peer=peer, connections=len(times), retransmits=max(times))
        for (node, peer), times in sorted(paths.items())
    )


def addresses_of(nodes: Iterable[str], reports: Mapping[str, NodeReport]) -> dict[str, str]:
    """Return the addresses at which nodes are to be tried, and whose they are.

    They are those at which the node did not answer, or all its own if there is none.
    """
    unanswered = {address for report in reports.values() for address, _ in report.broken}
    owners: dict[str, str] = {}
    for node in nodes:
        own = reports[node].addresses if node in reports else ()
        owners |= dict.fromkeys([a for a in own if a in unanswered] or own, node)
    return owners


def shared_end(
    paths: Sequence[BrokenPath], reached: Mapping[str, Sequence[str]] | None = None
) -> tuple[tuple[str, ...], str]:
    """Return the nodes of broken paths, and in words what they have in common.

    They are only one if all paths lead to it, and only those that no third node has `reached`, if
    one has reached the others.
    """
    ends = [{path.node, path.peer} for path in paths]
    if not ends:
        return (), ""
    shared = set.intersection(*ends)
    nodes = tuple(sorted(set.union(*ends)))
    if len(shared) == 1 and len(nodes) > 2:
        (node,) = shared
        return (node,), f"every broken connection leads to {node}"
    thirds = {third: others for third, others in (reached or {}).items() if others}
    answered = {node for others in thirds.values() for node in others}
    cut_off = tuple(node for node in nodes if node not in answered)
    if thirds and cut_off:
        others = listed(sorted(answered))
        return cut_off, f"{listed([*thirds])} can reach {others}, and not {listed(cut_off)}"
    return nodes, "connections retransmit and get no answer"


def missing_ranks(ranks: Iterable[RankSample], nodes: Sequence[str]) -> list[RankSample]:
    """Return the ranks of a program that ended before any sample.

    Their node is known if it alone has fewer ranks than the others.
    """
    samples = list(ranks)
    known = {sample.rank for sample in samples}
    world = max((sample.world for sample in samples), default=0)
    counts = Counter(dict.fromkeys(nodes, 0))
    counts.update(sample.node for sample in samples)
    fewer = [node for node, count in counts.items() if count < max(counts.values(), default=0)]
    node = fewer[0] if len(fewer) == 1 else ""
    return [
        RankSample(rank=rank, node=node, gone=True) for rank in range(world) if rank not in known
    ]
