# SPDX-License-Identifier: Apache-2.0
"""Where a training hangs: a chain from no progress to the rank or network that the others wait for.

    no-progress -- KernelHangChecker -- ChipHangChecker -+- SendRecvHangChecker
                                                         +- CollectiveHangChecker -- HostHangChecker
                                                         +- HostHangChecker
                                                         +- NetworkHangChecker

Without stacks of kernels the chain begins at the metrics of chips, without these at the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from slurm_health.records.script_records import (
    DATA_LOADER_STUCK,
    MOST_LINES,
    NEVER_ENTERED,
    NO_PROGRESS,
    RANK_ELSEWHERE,
    RANK_GONE,
)
from slurm_health.records.text import listed, ranks_text
from slurm_health.training.diagnosis import surroundings, waits
from slurm_health.training.diagnosis.collected import FlightRecords, NodeStates, SlurmView
from slurm_health.training.diagnosis.collectives import CollectiveState, Why
from slurm_health.training.diagnosis.diagnostician import diagnosed
from slurm_health.training.diagnosis.ras import ranks_by_ras
from slurm_health.training.diagnosis.samples import (
    IN_KERNEL,
    STOPPED,
    Doing,
    RankSample,
    StackPlace,
    Standstill,
    nodes_of,
    ranks_of,
    shared_end,
    where_line,
    who,
)
from slurm_health.training.framework import (
    Attribution,
    DataManager,
    DiagnosisAction,
    DiagnosisObservation,
    Diagnostician,
    EventAction,
    Inference,
    InferenceOperator,
    OperatorMaker,
    Sureness,
)

KERNELS, CHIPS = "kernels-hang", "chips-wait"
KERNEL_STACKS = "KernelStacks"  # of a site's collector: the kernel on the device by rank, or ""
_NAMES = {Doing.LOADING: DATA_LOADER_STUCK, Doing.CHECKPOINT: "checkpoint-stuck"}
_ADVICE = {
    Doing.LOADING: "look at what the data loader reads there: its file, filesystem or pipe",
    Doing.CHECKPOINT: "look at the filesystem that the checkpoint goes to, as this node sees it",
    Doing.OWN_CODE: "look at this line of the script, and at what it waits for on this node",
}
_NOT_IN_BACKWARD = {"barrier", "monitored_barrier", "broadcast", "all_gather_object"}
_LOST_STATES = ("DOWN", "NOT_RESPONDING", "*")  # of a node, as Slurm writes them

Placed = list[tuple[RankSample, StackPlace]]


class Scene:
    """The collected data of a training that hangs, in the terms of its operators.

    Attributes:
        data: all of it.
        standstill: of that training.
        kernels: the kernel on the device by rank, empty unless all are in one.
        chips: the ranks whose GPUs wait for their peers.
    """

    def __init__(self, data: DataManager) -> None:
        self.data = data
        self.standstill = data.get(Standstill) or Standstill(stalled_s=0.0, allowance_s=0.0)
        self.ranks = self.standstill.ranks
        flights = data.get(FlightRecords)
        self._records = flights.records if flights else ()
        kernels: dict[str, str] = data.get(KERNEL_STACKS) or {}
        self.kernels = kernels if all(kernels.values()) else {}
        self.chips = [rank for rank in self.ranks if rank.gpu_waits]

    @cached_property
    def collectives(self) -> CollectiveState:
        """How far the ranks came, by their Flight Recorders."""
        return CollectiveState(self._records)

    @property
    def is_transfer(self) -> bool:
        """Whether all that is missing is the other half of a send or a receive."""
        missing = self.collectives.culprits
        return bool(missing) and all(culprit.why is Why.NO_TRANSFER for culprit in missing)

    @cached_property
    def placed(self) -> Placed:
        """The places of ranks by their stacks; in a collective if their device is in one."""
        last = {record.rank: record.operations[-1] for record in self._records if record.operations}
        placed = []
        for rank in self.ranks:
            place, pending = rank.place, last.get(rank.rank)
            if pending and not pending.is_over and place.doing is Doing.OWN_CODE:
                place = StackPlace(doing=Doing.COLLECTIVE, what=pending.what, at=place.at)
            if rank.stack:
                placed.append((rank, place))
        return placed

    @property
    def inside(self) -> Placed:
        """The ranks in a collective."""
        return [at for at in self.placed if at[1].doing is Doing.COLLECTIVE]

    @property
    def outside(self) -> Placed:
        """The ranks that are elsewhere."""
        return [at for at in self.placed if at[1].doing is not Doing.COLLECTIVE]

    @property
    def holding_up(self) -> Placed:
        """The ranks that the others wait for.

        On a GPU the host does not wait in a collective, but wherever it next needs the device: in
        `loss.item()`, `synchronize`, `clip_grad_norm_`. The Flight Recorder distinguishes such a
        rank from one that is elsewhere; else the activity of its GPU does, the call, and if none is
        in a collective their number: most stand at one line and use no processor.
        """
        difference, outside = self.collectives.difference, self.outside
        if difference is not None and not difference.mismatched:
            return [at for at in outside if at[0].rank in difference.ranks]
        waiting = [
            (rank, place)
            for rank, place in outside
            if place.doing is Doing.OWN_CODE and rank.state != IN_KERNEL
        ]
        if not self.inside and waiting:
            line, most = Counter(place.at for _, place in waiting).most_common(1)[0]
            at_line = [at for at in waiting if at[1].at == line]
            few = [at for at in outside if at not in at_line]
            outside = few if few and most > len(self.ranks) / 2 else outside
        busy = []
        for rank, place in outside:
            last = rank.stack[-1]
            synchronizes = "torch/cuda/" in last.file and last.function == "synchronize"
            if place.doing is not Doing.OWN_CODE or not (rank.gpu_waits or synchronizes):
                busy.append((rank, place))
        return busy or outside

    @property
    def silent(self) -> tuple[RankSample, ...]:
        """All ranks, if none has a stack, or is gone or stopped."""
        known = any(rank.stack or rank.gone or rank.state == STOPPED for rank in self.ranks)
        return () if known else self.ranks

    @property
    def waits_by_sockets(self) -> bool:
        """Whether nodes get no answer, and ranks are at most in code of their own."""
        known = self.standstill.stopped or any(rank.gone or rank.gpu_waits for rank in self.ranks)
        own = all(place.doing is Doing.OWN_CODE for _, place in self.placed)
        return self.standstill.is_cut and own and not (known or self.collectives.difference)

    @property
    def awaiting_servers(self) -> list[RankSample]:
        """The ranks outside of collectives that wait for a file on a server."""
        waiting = self.standstill.waiting
        return [r for r in self.ranks if r.storage and not r.gone and r.rank not in waiting]

    @property
    def awaiting_files(self) -> list[RankSample]:
        """The silent ranks that wait for a file, unless all wait for the same."""
        ranks = self.silent
        # Waits in common are normal for the program: a loader's workers read from pipes.
        common = frozenset.intersection(*(r.file_waits for r in ranks)) if ranks else frozenset()
        awaiting = [rank for rank in ranks if rank.file_waits - common]
        return awaiting if len(awaiting) < len(ranks) else []


Rule = Callable[[Inference, Scene], Inference | None]
_SYMPTOM = Inference(name=NO_PROGRESS)  # for rules that are shared with failures


class HangOperator(InferenceOperator):
    """A step of the chain: rules that lead on from the inferences `behind`.

    Kernels come before chips, and chips before the rest, as far as there are any.
    """

    behind: ClassVar[tuple[str, ...]] = ()
    rules: ClassVar[tuple[Rule, ...]] = ()

    def __init__(self, data_manager: DataManager) -> None:
        super().__init__(data_manager)
        self.scene = Scene(data_manager)

    @property
    def begins(self) -> str:
        """The inference from which the chain reaches it."""
        return CHIPS if self.scene.kernels or self.scene.chips else NO_PROGRESS

    def is_compatible(self, inference: Inference) -> bool:
        """Whether the chain has reached it."""
        return inference.name in {self.begins, *self.behind}

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Return the inferences of its rules."""
        inferred = (rule(behind, self.scene) for behind in inferences for rule in self.rules)
        return [inference for inference in inferred if inference is not None]


def kernels_hang(_: Inference, scene: Scene) -> Inference | None:
    """Every device is in a kernel."""
    if not scene.kernels:
        return None
    lines = tuple(f"rank {rank} is in {kernel}" for rank, kernel in scene.kernels.items())
    description = "all devices are in kernels"
    return Inference(name=KERNELS, description=description, evidence=lines[:MOST_LINES])


class KernelHangChecker(HangOperator):
    """Kernels on the devices, from a collector such as a timer: XPUTimerHangChecker."""

    begins = NO_PROGRESS
    rules = (kernels_hang,)


def chips_wait(_: Inference, scene: Scene) -> Inference | None:
    """Chips are in use and do next to nothing: their ranks wait for each other."""
    if not scene.chips and not scene.kernels:
        return None
    gpus = f"the GPUs of {who(scene.chips)} wait for their peers" if scene.chips else "chips wait"
    return _about(scene.chips, name=CHIPS, description=gpus)


class ChipHangChecker(HangOperator):
    """The activity of chips, and the log of their driver: AntMonitorHangChecker."""

    rules = (lambda inference, scene: surroundings.gpu_errors(inference, scene.data), chips_wait)

    @property
    def begins(self) -> str:
        """Behind the stacks of kernels, if there are any."""
        return KERNELS if self.scene.kernels else NO_PROGRESS


class SendRecvHangChecker(HangOperator):
    """A send whose peer has not begun its receive, or the other way: SendRecvHangChecker."""

    rules = (
        lambda _, scene: waits.ranks_parted(_SYMPTOM, scene.data) if scene.is_transfer else None,
    )


def collective_parted(_: Inference, scene: Scene) -> Inference | None:
    """By the ranks' records they parted in a collective."""
    return None if scene.is_transfer else waits.ranks_parted(_SYMPTOM, scene.data)


def waits_differ(_: Inference, scene: Scene) -> Inference | None:
    """All ranks are in collectives, and at least two of these differ by their names.

    Possible only: a rank that lags behind also waits elsewhere.
    """
    by_name: dict[str, list[RankSample]] = {}
    for rank, place in scene.inside:
        by_name.setdefault(place.what, []).append(rank)
    # A backward pass may be in any other collective.
    apart = by_name.keys() & _NOT_IN_BACKWARD
    differ = len(by_name.keys() - (set() if apart else {"backward"})) > 1
    # Where a connection is broken, ranks in groups of their own stop one after another.
    if not differ or scene.outside or scene.standstill.paths:
        return None
    # Not the many; and who has gone to one for all ranks has left the others behind.
    many = {what for what, ranks in by_name.items() if 2 * len(ranks) >= len(scene.ranks)}
    few = min(by_name, key=lambda what: (what in many, what not in apart, len(by_name[what])))
    places = "; ".join(f"{ranks_text(ranks_of(r))} in {what}" for what, r in by_name.items())
    return _about(
        by_name[few],
        name="collectives-differ",
        description=f"ranks wait for each other in different collectives ({places})",
        attribution=Attribution.USER,
        sureness=Sureness.POSSIBLE,
        evidence=tuple(where_line(*at) for at in scene.inside[:MOST_LINES]),
        advice="check whether every rank calls the same collectives in the same order",
    )


def never_met(_: Inference, scene: Scene) -> Inference | None:
    """No rank comes out of the rendezvous, and no connection between nodes is broken."""
    inside, ranks = scene.inside, [rank for rank, _ in scene.inside]
    if scene.standstill.paths or scene.outside or not 2 <= len(inside) >= len(scene.ranks):
        return None
    if not all(place.meets for _, place in inside):
        return None
    others, most = Counter(rank.meets for rank in ranks).most_common(1)[0]
    apart = [rank for rank in ranks if rank.meets != others] if most > len(ranks) / 2 else []
    those = f"{who(ranks)} waits" if ranks[0].launches else f"{ranks_text(ranks_of(ranks))} wait"
    what = f"{those} in the rendezvous for others that do not come"
    if apart:
        other = f"{who(apart)} {_have(apart)} another address of the rendezvous"
        what = f"{other} ({apart[0].meets or 'none'}) than the others ({others})"
    return _about(
        apart or ranks,
        name="rendezvous-never-formed",
        description=what,
        attribution=Attribution.USER,
        sureness=Sureness.LIKELY,
        evidence=tuple(where_line(*at) for at in inside[:MOST_LINES]),
        advice="check that all have the same address and port (MASTER_ADDR and MASTER_PORT, or"
        " torchrun's --rdzv-endpoint), and that as many start as are waited for",
    )


class CollectiveHangChecker(HangOperator):
    """Ranks that have not entered a collective of the others: XCCLHangChecker."""

    rules = (
        lambda _, scene: waits.data_ended_before(_SYMPTOM, scene.data),
        collective_parted,
        lambda inference, scene: ranks_by_ras(inference, scene.data),
        never_met,
        waits_differ,
    )


def rank_gone(_: Inference, scene: Scene) -> Inference | None:
    """The process of a rank that was there has ended, and others still wait for it."""
    gone = [rank for rank in scene.ranks if rank.gone]
    if not gone:
        return None
    lines = [
        f"process {rank.pid} of rank {rank.rank} on {rank.node} is gone; its last step was"
        f" {rank.step}"
        if rank.pid
        else f"rank {rank.rank} has no process, and had none when the monitor began"
        for rank in gone[:MOST_LINES]
    ]
    return _about(
        gone,
        name=RANK_GONE,
        description=f"{who(gone)} {_have(gone)} ended, and the others still wait",
        # A process that never appeared may be hidden, as in a container, or have done its part.
        sureness=Sureness.CERTAIN if all(rank.pid for rank in gone) else Sureness.POSSIBLE,
        evidence=tuple(lines),
        advice="look at the last lines of this rank, and at memory used up on its node; have"
        " srun end the others with it (--kill-on-bad-exit=1)",
    )


def rank_stopped(_: Inference, scene: Scene) -> Inference | None:
    """A signal stopped a rank; if all of them are stopped, the whole job was suspended."""
    stopped = scene.standstill.stopped
    if not 0 < len(stopped) < len(scene.ranks):
        return None
    return _about(
        stopped,
        name="rank-stopped",
        description=f"{who(stopped)} {_have(stopped)} been stopped by a signal (SIGSTOP, a"
        " debugger)",
        sureness=Sureness.CERTAIN,
        evidence=tuple(
            f"process {rank.pid} of rank {rank.rank} on {rank.node} is in state {rank.state}"
            " (stopped)"
            for rank in stopped[:MOST_LINES]
        ),
        advice=f"resume it: kill -CONT {stopped[0].pid} on {stopped[0].node}",
        advises_process=True,
    )


def rank_elsewhere(inference: Inference, scene: Scene) -> Inference | None:
    """Ranks do not reach a collective, whether others wait in it or not.

    By their stacks they wait for data, are at a checkpoint, or in code of their own.
    """
    difference, held_up_by = scene.collectives.difference, scene.holding_up
    # A Flight Recorder that shows the missing ranks leads here.
    missing = difference is not None and not difference.mismatched
    is_behind = (inference.name == NEVER_ENTERED) == missing
    if not is_behind or not held_up_by or scene.waits_by_sockets:
        return None
    away = {rank.rank for rank, _ in held_up_by}
    inside = [rank.rank for rank, _ in scene.placed if rank.rank not in away]
    # Unlike code of its own, a loader or a checkpoint does not wait for other ranks.
    known = (place.doing for _, place in held_up_by if place.doing is not Doing.OWN_CODE)
    doing = next(known, Doing.OWN_CODE)
    same = [(rank, place) for rank, place in held_up_by if place.doing is doing]
    ranks = [rank for rank, _ in same]
    one = len(ranks) == 1
    is_, its = ("is", "its") if one else ("are", "their")
    does = {
        Doing.LOADING: f"{'waits' if one else 'wait'} for the data loader",
        Doing.CHECKPOINT: f"{is_} at a checkpoint",
    }.get(doing, f"{is_} in code of {its} own")
    at = f" ({same[0][1].at})" if same[0][1].at else ""
    others = ""
    if inside:
        what = "in a collective" if scene.inside else f"for {'it' if one else 'them'}"
        others = f", while {ranks_text(inside)} {'waits' if len(inside) == 1 else 'wait'} {what}"
    kernel = any(rank.state == IN_KERNEL for rank in ranks)
    return _about(
        ranks,
        name=_NAMES.get(doing, RANK_ELSEWHERE),
        description=f"{who(ranks)} {does}{at}{others}",
        sureness=Sureness.LIKELY,
        evidence=tuple(where_line(*place) for place in same[:MOST_LINES]),
        advice=_ADVICE[doing] + (" (it waits in the kernel)" if kernel else ""),
    )


def file_awaited(_: Inference, scene: Scene) -> Inference | None:
    """Ranks wait in the kernel for files of a server; or some do for any, while others do not.

    On several nodes it is the server, or the way to it; on one it may be this node's client.
    Without a server no rank has a stack, and none is gone or stopped, which would explain more.
    """
    remote = scene.awaiting_servers
    ranks = remote or scene.awaiting_files
    if not ranks:
        return None
    waits = "waits" if len(ranks) == 1 else "wait"
    what = f"{who(ranks)} {waits} for a file, a pipe or a filesystem, and no other rank does"
    if remote:
        stalled_s = scene.standstill.stalled_s
        what = f"{who(ranks)} {waits} for storage, {ranks[0].storage}, for {stalled_s:.0f} s"
    one_node = not remote or len(nodes_of(ranks)) == 1 < len(scene.standstill.nodes)
    return Inference(
        name="file-awaited",
        description=what if one_node else f"{what}: its server, or the way to it",
        sureness=Sureness.LIKELY,
        nodes=nodes_of(ranks) if one_node else (),
        ranks=ranks_of(ranks),
        evidence=tuple(
            f"rank {rank.rank} on {rank.node}: process {rank.pid}, state {rank.state}, waits in"
            f" the kernel: {rank.kernel}" + (f", {rank.storage}" if rank.storage else "")
            for rank in ranks[:MOST_LINES]
        ),
        advice="look at its open files (ls -l /proc/PID/fd), and whether their filesystems answer"
        " on this node",
        advises_process=True,
    )


class HostHangChecker(HangOperator):
    """The activity of ranks that others wait for: the rest of AntMonitorHangChecker."""

    behind = (RANK_GONE, NEVER_ENTERED)

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Lead on from a rank that is gone or missing, else from the standstill."""
        (behind,) = inferences
        if behind.name == RANK_GONE:
            killed = surroundings.killed_for_memory(behind, self.scene.data)
            return [killed] if killed else []
        rules: tuple[Rule, ...] = (rank_gone, rank_stopped, rank_elsewhere, file_awaited)
        if self.scene.awaiting_servers:
            rules = (rank_gone, rank_stopped, file_awaited)
        elif behind.name == NEVER_ENTERED:
            rules = (rank_elsewhere,)
        return [inferred for rule in rules if (inferred := rule(behind, self.scene))]


def network_of_group(_: Inference, scene: Scene) -> Inference | None:
    """The network between nodes: by broken connections, or by exclusion.

    All ranks are in the same collective, and none leaves it; or connections between nodes get no
    answer, and stacks show nothing better. The node that they share is named, if there is one.
    """
    inside, paths = scene.inside, scene.standstill.paths
    ranks: Sequence[RankSample] = [rank for rank, _ in inside]
    alike = scene.collectives.difference is None and waits_differ(_SYMPTOM, scene) is None
    if 2 <= len(scene.ranks) == len(inside) and alike:
        what = f"all ranks are in a collective ({inside[0][1].what}) and none leaves it"
    elif scene.waits_by_sockets and not (scene.awaiting_files or scene.awaiting_servers):
        what, ranks = "data between nodes of the job is not answered", scene.ranks
    else:
        return None
    ends, means = shared_end(paths, scene.standstill.reached)
    nodes = ends or nodes_of(ranks)
    return Inference(
        name="network-of-group",
        description=f"{what}: the network between {listed(nodes)}{f'; {means}' if means else ''}",
        # Broken connections show the way; without them it is an exclusion.
        sureness=Sureness.LIKELY if paths else Sureness.POSSIBLE,
        nodes=nodes,
        ranks=ranks_of([rank for rank in ranks if rank.node in nodes]),
        evidence=(
            *(
                f"{path.node} gets no answer from {path.peer}: {path.connections} connections, up"
                f" to {path.retransmits} retransmissions"
                for path in paths[:MOST_LINES]
            ),
            *(where_line(*at) for at in inside[:1]),
        ),
        advice="check these nodes' connections before the next start (slurm-health check"
        " --network-check)",
    )


def node_silent(_: Inference, scene: Scene) -> Inference | None:
    """The agent of a node does not answer, and those of others do.

    Only Slurm or a connection can confirm that it is the node, or the network to it: else its agent
    has ended, or has no processor, which means nothing for the node.
    """
    standstill, silent = scene.standstill, scene.standstill.silent
    if not 0 < len(silent) < len(standstill.nodes):
        return None
    one = len(silent) == 1
    reports, slurm = scene.data.get(NodeStates), scene.data.get(SlurmView)
    unreached = {end for path in standstill.paths for end in (path.node, path.peer)}
    unreached |= set(reports.silent if reports else ())
    states = slurm.node_states if slurm else {}
    unreached |= {n for n, s in states.items() if any(mark in s.upper() for mark in _LOST_STATES)}
    if not unreached & set(silent):
        return Inference(
            name="agent-ended",
            description=f"no answer from the agent{'' if one else 's'} on {listed(silent)}, and the"
            " collected data does not show where the training hangs",
            sureness=Sureness.POSSIBLE,
            evidence=("neither Slurm nor a connection shows a loss of the node",),
            advice=f"look at the ranks on {silent[0]} (py-spy dump --pid PID)",
        )
    return Inference(
        name="node-silent",
        description=f"{listed(silent)} no longer answer{'s' if one else ''}: the node, or the"
        " network to it",
        sureness=Sureness.LIKELY,
        nodes=silent,
        ranks=ranks_of([rank for rank in scene.ranks if rank.node in silent]),
        evidence=(f"no answer from the agent on {listed(silent)}",),
        advice=f"check whether Slurm still reaches it: scontrol show node {silent[0]}",
    )


class NetworkHangChecker(HangOperator):
    """The network between the nodes; DLRover's design ends at the collective."""

    rules = (network_of_group, node_silent)


class HangDiagnostician(Diagnostician):
    """Infers where a training hangs; `pulse` decides whether it does."""

    operators: ClassVar[Sequence[OperatorMaker]] = (
        KernelHangChecker,
        ChipHangChecker,
        SendRecvHangChecker,
        CollectiveHangChecker,
        HostHangChecker,
        NetworkHangChecker,
    )

    def observe(self, **kwargs: Any) -> DiagnosisObservation | None:
        """Return that there is no progress, None if the training goes on or may go on."""
        standstill = kwargs["data_manager"].get(Standstill)
        if standstill is None or standstill.why_not:
            return None
        if standstill.stalled_s < standstill.allowance_s:
            return None
        symptom = Inference(
            name=NO_PROGRESS,
            description=f"no step for {standstill.stalled_s:.0f} s; the collected data does not"
            " show where it hangs",
            evidence=(
                f"a pause of {standstill.allowance_s:.0f} s would be usual for this training",
            ),
            advice="look at the stacks of its ranks (py-spy dump --pid PID)",
        )
        return DiagnosisObservation(NO_PROGRESS, symptom=symptom)

    def resolve(self, problem: DiagnosisObservation, **kwargs: Any) -> DiagnosisAction:
        """Walk from the standstill to its cause."""
        assert problem.symptom is not None
        data: DataManager = kwargs["data_manager"]
        walk = self.walk(problem.symptom, data)
        cause = diagnosed(walk, data)
        way = walk.way_to(walk.conclusion)
        if len(way) > 1 and way[-2].after.name in {KERNELS, CHIPS}:
            cause = msgspec.structs.replace(cause, first="")  # that ranks wait is no cause
        return EventAction(diagnosed=cause)


def _about(ranks: Sequence[RankSample], **more: Any) -> Inference:
    numbers = () if ranks[0].launches else ranks_of(ranks)
    return Inference(nodes=nodes_of(ranks), ranks=numbers, **more)


def _have(ranks: Sequence[RankSample]) -> str:
    return "has" if len(ranks) == 1 else "have"
