# SPDX-License-Identifier: Apache-2.0
"""Where a training hangs: which rank does not come to what the others wait in, and why.

From `no-progress`, the symptom, to a rank that is gone or stopped, and to one that is elsewhere
while the others are in a collective; where all are in it and none leaves, to the network between.
Of ranks that say nothing it is told by what they wait for in the kernel, and by TCP.
"""

from __future__ import annotations

import re
from collections import Counter

from slurm_health.records.script_records import (
    DATA_LOADER_STUCK,
    MOST_LINES,
    NEVER_ENTERED,
    NO_PROGRESS,
    RANK_ELSEWHERE,
    RANK_GONE,
)
from slurm_health.records.text import listed, ranks_text
from slurm_health.training.diagnosis.collected import FlightRecords, NodesTold
from slurm_health.training.diagnosis.flight import Difference, first_difference
from slurm_health.training.diagnosis.flight_data import is_over
from slurm_health.training.diagnosis.seen import (
    IN_KERNEL,
    STOPPED,
    Doing,
    RankSeen,
    StackPlace,
    Standstill,
    broken_line,
    gone_line,
    have,
    nodes_of,
    place_of,
    ranks_of,
    shared_end,
    where_line,
    who,
)
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

_ADVICE = {
    Doing.LOADING: "look at what the data loader reads there: its file, filesystem or pipe",
    Doing.CHECKPOINT: "look at the filesystem that the checkpoint goes to, as this node sees it",
    Doing.OWN_CODE: "look at this line of the script, and at what it waits for on this node",
}
# Functions of the kernel in which a process waits for a file, a pipe or a filesystem. Ranks that
# wait for each other are in futexes, polls and sockets.
_FILES = re.compile(
    r"wait_for_partner|pipe_(?:read|wait)|fuse|request_wait_answer|nfs|rpc_wait|lustre|cl_(?:io|sync)"
    r"|ldlm|ceph|cxi|gpfs|beegfs|folio_wait|wait_on_page|io_schedule|flock|locks?_"
)


def rank_gone(_: Inference, data: DataManager) -> Inference | None:
    """The process of a rank that was seen before has ended, and others still wait for it."""
    gone = _gone(data)
    if not gone:
        return None
    return Inference(
        name=RANK_GONE,
        description=f"{who(gone)} {have(gone)} ended, and the others still wait",
        # One that was never seen may be hidden, as in a container, or have done its part.
        sureness=Sureness.CERTAIN if all(each.pid for each in gone) else Sureness.POSSIBLE,
        nodes=nodes_of(gone),
        ranks=ranks_of(gone),
        evidence=tuple(map(gone_line, gone[:MOST_LINES])),
        advice="look at what this rank wrote last, and at memory used up on its node; have"
        " srun end the others with it (--kill-on-bad-exit=1)",
    )


def rank_stopped(_: Inference, data: DataManager) -> Inference | None:
    """The process of a rank was stopped by a signal.

    Where all of them are stopped, the whole job was suspended.
    """
    stopped = _stopped(data)
    if not 0 < len(stopped) < len(_ranks_of(data)):
        return None
    first = stopped[0]
    return Inference(
        name="rank-stopped",
        description=f"{who(stopped)} {have(stopped)} been stopped by a signal (SIGSTOP, a"
        " debugger)",
        sureness=Sureness.CERTAIN,
        nodes=nodes_of(stopped),
        ranks=ranks_of(stopped),
        evidence=tuple(
            f"process {each.pid} of rank {each.rank} on {each.node} is in state"
            f" {each.state} (stopped)"
            for each in stopped[:MOST_LINES]
        ),
        advice=f"let it go on: kill -CONT {first.pid} on {first.node}",
    )


def rank_elsewhere(inference: Inference, data: DataManager) -> Inference | None:
    """Ranks are where they do not get to a collective, whether others wait in it or not.

    By their stacks they wait for data, are at a checkpoint, or in code of their own.
    """
    # Where a Flight Recorder tells who is missing, it leads here.
    symptom = NEVER_ENTERED if _someone_is_missing(data) else NO_PROGRESS
    outside = _elsewhere(data)
    if inference.name != symptom or not outside:
        return None
    away = {each.rank for each, _ in outside}
    inside = [each.rank for each, _ in _placed(data) if each.rank not in away]
    # One that loads or is at a checkpoint does not wait there for others, as code of its own may.
    known = (place.doing for _, place in outside if place.doing is not Doing.OWN_CODE)
    doing = next(known, Doing.OWN_CODE)
    same = [(each, place) for each, place in outside if place.doing is doing]
    seen = [each for each, _ in same]
    verb = "is" if len(seen) == 1 else "are"
    words = {
        Doing.LOADING: f"{'waits' if len(seen) == 1 else 'wait'} for the data loader",
        Doing.CHECKPOINT: f"{verb} at a checkpoint",
    }.get(doing, f"{verb} in code of {'its' if len(seen) == 1 else 'their'} own")
    at = f" ({same[0][1].at})" if same[0][1].at else ""
    wait = "waits" if len(inside) == 1 else "wait"
    others = f", while {ranks_text(inside)} {wait} {_for_what(data)}" if inside else ""
    kernel = any(each.state == IN_KERNEL for each in seen)
    return Inference(
        name={
            Doing.LOADING: DATA_LOADER_STUCK,
            Doing.CHECKPOINT: "checkpoint-stuck",
        }.get(doing, RANK_ELSEWHERE),
        description=f"{who(seen)} {words}{at}{others}",
        sureness=Sureness.LIKELY,
        nodes=nodes_of(seen),
        ranks=ranks_of(seen),
        evidence=tuple(where_line(each, place) for each, place in same[:MOST_LINES]),
        advice=_ADVICE[doing] + (" (it waits in the kernel)" if kernel else ""),
    )


def waits_differ(_: Inference, data: DataManager) -> Inference | None:
    """All ranks are in collectives, and at least two of these differ by their names.

    Possible only: a rank that lags behind also waits elsewhere.
    """
    names = {place.what for _, place in _inside(data)} - {"backward"}
    if len(names) < 2 or _outside(data):
        return None
    by_name: dict[str, list[RankSeen]] = {}
    for each, place in _inside(data):
        by_name.setdefault(place.what, []).append(each)
    fewest = min(by_name.values(), key=len)
    said = "; ".join(f"{ranks_text(ranks_of(ranks))} in {what}" for what, ranks in by_name.items())
    return Inference(
        name="collectives-differ",
        description=f"ranks wait for each other in different collectives ({said})",
        attribution=Attribution.USER,
        sureness=Sureness.POSSIBLE,
        nodes=nodes_of(fewest),
        ranks=ranks_of(fewest),
        evidence=tuple(where_line(*each) for each in _inside(data)[:MOST_LINES]),
        advice="check whether every rank calls the same collectives in the same order",
    )


def no_rank_leaves(_: Inference, data: DataManager) -> Inference | None:
    """All ranks are alive in the same collective, and none leaves it: the network between them.

    It is the path that all broken connections share, where there is one.
    """
    standstill = data.get(Standstill)
    if standstill is None or len(standstill.ranks) < 2 or _difference(data) is not None:
        return None
    inside = _inside(data)
    if len(inside) != len(standstill.ranks):
        return None
    what = inside[0][1].what
    culprit, means = shared_end(standstill.paths)
    sent = f"; {means}" if means else ""
    nodes = culprit or nodes_of([each for each, _ in inside])
    return Inference(
        name="network-of-group",
        description=f"all ranks are in a collective ({what}) and none leaves it: the"
        f" network between {listed(nodes)}{sent}",
        # Connections that break show which way; without them it is what is left.
        sureness=Sureness.LIKELY if standstill.paths else Sureness.POSSIBLE,
        nodes=nodes,
        ranks=ranks_of([each for each, _ in inside if each.node in nodes]),
        evidence=(*map(broken_line, standstill.paths[:MOST_LINES]), where_line(*inside[0])),
        advice="check these nodes' connections before the next start (slurm-health check"
        " --network-check)",
    )


def node_silent(_: Inference, data: DataManager) -> Inference | None:
    """The monitor of a node does not answer any more, and those of others do.

    The node, or the way to it, only where a connection to it or another question to it says so:
    else its monitor has ended, which tells nothing of the node.
    """
    standstill, told = data.get(Standstill), data.get(NodesTold)
    if standstill is None or not 0 < len(standstill.silent) < len(standstill.nodes):
        return None
    alone = len(standstill.silent) == 1
    unreached = {end for path in standstill.paths for end in (path.node, path.peer)}
    unreached |= set(told.silent if told else ())
    if not unreached & set(standstill.silent):
        return Inference(
            name="monitor-ended",
            description=f"{'the monitor' if alone else 'the monitors'} on"
            f" {listed(standstill.silent)} ended, and nothing that was collected says where the"
            " training hangs",
            sureness=Sureness.POSSIBLE,
            evidence=(f"no answer from the monitor on {listed(standstill.silent)}",),
            advice=f"look at the ranks on {standstill.silent[0]} (py-spy dump --pid PID)",
        )
    there = [each for each in standstill.ranks if each.node in standstill.silent]
    return Inference(
        name="node-silent",
        description=f"{listed(standstill.silent)} {'does' if alone else 'do'} not answer any"
        " more: the node, or the network to it",
        sureness=Sureness.LIKELY,
        nodes=standstill.silent,
        ranks=ranks_of(there),
        evidence=(f"nothing was heard from the monitor on {listed(standstill.silent)}",),
        advice=f"check whether Slurm still reaches it: scontrol show node {standstill.silent[0]}",
    )


def _difference(data: DataManager) -> Difference | None:
    flight = data.get(FlightRecords)
    return first_difference(flight.records) if flight else None


def _someone_is_missing(data: DataManager) -> bool:
    difference = _difference(data)
    return difference is not None and not difference.mismatched


def _ranks_of(data: DataManager) -> tuple[RankSeen, ...]:
    standstill = data.get(Standstill)
    return standstill.ranks if standstill else ()


def _gone(data: DataManager) -> list[RankSeen]:
    return [each for each in _ranks_of(data) if each.gone]


def _stopped(data: DataManager) -> list[RankSeen]:
    return [each for each in _ranks_of(data) if each.state == STOPPED and not each.gone]


def _placed(data: DataManager) -> list[tuple[RankSeen, StackPlace]]:
    """Return where ranks are: by their stacks, and in a collective where their device is in one."""
    flight = data.get(FlightRecords)
    last = (
        {each.rank: each.operations[-1] for each in flight.records if each.operations}
        if flight
        else {}
    )
    placed = []
    for seen in _ranks_of(data):
        place = place_of(seen.stack)
        pending = last.get(seen.rank)
        if pending and not is_over(pending) and place.doing is Doing.OWN_CODE:
            place = StackPlace(doing=Doing.COLLECTIVE, what=pending.what, at=place.at)
        if seen.stack:
            placed.append((seen, place))
    return placed


def _inside(data: DataManager) -> list[tuple[RankSeen, StackPlace]]:
    return [each for each in _placed(data) if each[1].doing is Doing.COLLECTIVE]


def _elsewhere(data: DataManager) -> list[tuple[RankSeen, StackPlace]]:
    """Return the ranks that the others wait for.

    On a GPU the host does not stand in a collective, but wherever it next needs the device: in
    `loss.item()`, `synchronize`, `clip_grad_norm_`. Those are told from a rank that is elsewhere by
    the Flight Recorder; else by what their GPU does, by the call, and where none is in a collective
    by their number: most stand at one line and use no processor.
    """
    outside = _outside(data)
    difference = _difference(data)
    if difference is not None and not difference.mismatched:
        return [each for each in outside if each[0].rank in difference.ranks]
    if not _inside(data):
        lines = Counter(place.at for each, place in outside if _may_wait(each, place))
        at, most = lines.most_common(1)[0] if lines else ("", 0)
        few = [each for each in outside if each[1].at != at or not _may_wait(*each)]
        outside = few if few and most > len(_ranks_of(data)) / 2 else outside
    return [each for each in outside if not _waits_for_device(*each)] or outside


def _may_wait(seen: RankSeen, place: StackPlace) -> bool:
    """Tell whether a rank may wait for its device: it does nothing that is known, and no work."""
    return place.doing is Doing.OWN_CODE and seen.state != IN_KERNEL


def _waits_for_device(seen: RankSeen, place: StackPlace) -> bool:
    """Tell whether a rank is known to wait for its device, and so for the collectives on it."""
    last = seen.stack[-1]
    synchronizes = "torch/cuda/" in last.file and last.function == "synchronize"
    return place.doing is Doing.OWN_CODE and (seen.gpu_waits or synchronizes)


def _for_what(data: DataManager) -> str:
    return "in a collective" if _inside(data) else "for what their devices do"


def _outside(data: DataManager) -> list[tuple[RankSeen, StackPlace]]:
    return [each for each in _placed(data) if each[1].doing is not Doing.COLLECTIVE]


def file_awaited(_: Inference, data: DataManager) -> Inference | None:
    """Some ranks wait in the kernel for a file, and the others do not.

    No rank says where it is, and none is gone or stopped, which says more.
    """
    waiting = _awaiting(data)
    if not waiting:
        return None
    several = len(waiting) > 1
    return Inference(
        name="file-awaited",
        description=f"{who(waiting)} {'wait' if several else 'waits'} for a file, a pipe or a"
        " filesystem, and no other rank does",
        sureness=Sureness.LIKELY,
        nodes=nodes_of(waiting),
        ranks=ranks_of(waiting),
        evidence=tuple(
            f"rank {each.rank} on {each.node}: process {each.pid}, state {each.state},"
            f" waits in the kernel: {each.kernel}"
            for each in waiting[:MOST_LINES]
        ),
        advice="look at the files that it has open there (ls -l /proc/PID/fd), and whether"
        " their filesystems answer on this node",
    )


def connections_unanswered(_: Inference, data: DataManager) -> Inference | None:
    """Connections between nodes of the job are not answered, and no rank says where it is.

    It is the node that all of them share, where there is one.
    """
    standstill = _silent(data)
    if standstill is None or not standstill.paths or _awaiting(data):
        return None
    nodes, means = shared_end(standstill.paths)
    return Inference(
        name="network-of-group",
        description=f"data between nodes of the job is not answered: the network between"
        f" {listed(nodes)}; {means}",
        sureness=Sureness.LIKELY,
        nodes=nodes,
        ranks=ranks_of(each for each in standstill.ranks if each.node in nodes),
        evidence=tuple(map(broken_line, standstill.paths[:MOST_LINES])),
        advice="check these nodes' connections before the next start (slurm-health check"
        " --network-check)",
    )


def _silent(data: DataManager) -> Standstill | None:
    """Return what was seen, where no rank says where it is."""
    found = data.get(Standstill)
    if found is None or any(each.stack for each in found.ranks):
        return None
    told = any(each.gone or each.state == STOPPED for each in found.ranks)
    return None if told else found


def _awaiting(data: DataManager) -> list[RankSeen]:
    """Return the ranks that wait for a file, unless all wait for the same."""
    found = _silent(data)
    ranks = found.ranks if found else ()
    waits = [{word for word in each.kernel.split(", ") if _FILES.search(word)} for each in ranks]
    # What all have in common is how the program waits: a data loader's workers read from pipes.
    common = set.intersection(*waits) if waits else set()
    awaiting = [each for each, words in zip(ranks, waits, strict=True) if words - common]
    return awaiting if len(awaiting) < len(ranks) else []
