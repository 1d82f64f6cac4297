# SPDX-License-Identifier: Apache-2.0
"""Ranks that waited for each other, and in what; the data of some may have ended before.

That is seen where ranks tell how many batches their data gave. Where they do not, a rank is out of
step that calls what every step has while the others call something else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurm_health.records.script_records import (
    MOST_LINES,
    NEVER_ENTERED,
    NO_PROGRESS,
    OUT_OF_STEP,
    SCRIPT_FAILED,
)
from slurm_health.records.text import listed, ranks_text
from slurm_health.training.diagnosis.collected import FlightRecords, TrainingLog
from slurm_health.training.diagnosis.flight import Difference, first_difference
from slurm_health.training.diagnosis.rank_failures import RankFailure, failed_ranks
from slurm_health.training.diagnosis.samples import (
    Doing,
    RankSample,
    Standstill,
    nodes_of,
    place_of,
    ranks_of,
    who,
)
from slurm_health.training.diagnosis.starting import never_met
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

# What NCCL's watchdog says of a work that took too long, and DDP of sizes that never came; an error
# of NCCL, with which it ends ranks too, has other words.
_STUCK = re.compile(r"watchdog (?:got stuck|hang)")
_OF_A_TIME_LIMIT = re.compile(
    "collective operation timeout|NCCL operations have failed or timed out|inconsistent 0 params"
)
_JOIN = "torch/distributed/algorithms/join.py"
_MORE_BATCHES = (
    "give all ranks as many batches (drop_last=True, a sampler that pads), or train below"
    " torch.distributed.algorithms.join.Join"
)


def collectives_differ(_: Inference, data: DataManager) -> Inference | None:
    """No rank failed by itself, and ranks waited for each other in different collectives.

    By their tracebacks. Possible only: a rank that lags behind also waits elsewhere.
    """
    waits = _waits(data)
    if len(waits) < 2:
        return None
    said = [f"{ranks_text(failed_ranks(each))} in {what}" for what, each in waits.items()]
    return Inference(
        name="collectives-differ",
        description="ranks waited for each other in different collectives ("
        + "; ".join(said)
        + "): the script lets them call different ones, or one of them lagged behind",
        attribution=Attribution.USER,
        sureness=Sureness.POSSIBLE,
        ranks=failed_ranks([each[0] for each in waits.values()]),
        evidence=tuple(each[0].line for each in waits.values())[:MOST_LINES],
        advice="check whether every rank calls the same collectives in the same order; to"
        " know, start again with TORCH_DISTRIBUTED_DEBUG=DETAIL",
    )


def flight_differs(inference: Inference, data: DataManager) -> Inference | None:
    """PyTorch's Flight Recorder shows where ranks parted.

    Who called something else, or who never entered what the others wait in.
    """
    flights = data.get(FlightRecords)
    difference = first_difference(flights.records) if flights and len(flights.records) > 1 else None
    if difference is None:
        return None
    # Of a script that has ended, each symptom has its own.
    ended = inference.name != NO_PROGRESS
    if ended and (inference.name == SCRIPT_FAILED) != difference.mismatched:
        return None
    if difference.of_a_step:
        return out_of_step(difference, _nodes_of(difference.ranks, data))
    if difference.mismatched:
        return Inference(
            name="mismatched-collective",
            description=difference.description,
            attribution=Attribution.USER,
            sureness=Sureness.CERTAIN,
            nodes=_nodes_of(difference.ranks, data),
            ranks=difference.ranks,
            evidence=difference.evidence,
            advice="have all ranks call the same collectives with the same sizes in the"
            " same order, and give all as many batches",
        )
    return Inference(
        name=NEVER_ENTERED,
        description=difference.description,
        sureness=Sureness.LIKELY,
        nodes=_nodes_of(difference.ranks, data),
        ranks=difference.ranks,
        evidence=difference.evidence,
        advice=f"look at what {ranks_text(difference.ranks)} did instead: the data loader,"
        " a filesystem, a GPU",
    )


def watchdog_tells(_: Inference, data: DataManager) -> Inference | None:
    """NCCL's watchdog on each rank wrote how far it came, and no dump was found that tells more.

    It is who had not called what the others timed out in; not those that wrote nothing.
    """
    log = data.get(TrainingLog)
    if log is None or len(log.progress) < 2 or data.get(FlightRecords) is not None:
        return None
    difference = first_difference(log.progress)
    if difference is None:
        return None
    told = {each.rank: each.reached for each in log.progress}
    ranks = [*difference.ranks, *(rank for rank in told if rank not in difference.ranks)]
    return Inference(
        name=NEVER_ENTERED,
        # PyTorch counts a work as enqueued once NCCL's call for it has returned.
        description=f"{difference.description}, or is held inside the call of it",
        sureness=Sureness.LIKELY,
        nodes=_nodes_of(difference.ranks, data),
        ranks=difference.ranks,
        evidence=tuple(
            f"NCCL's watchdog of rank {rank}: last enqueued {reached.entered}, last"
            f" completed {reached.over}"
            for rank in ranks
            for reached in told[rank].values()
        )[:MOST_LINES],
        advice=f"look at what {ranks_text(difference.ranks)} did instead: the data loader,"
        " a filesystem, a GPU; --flight-recorder=on tells more of the next hang",
    )


def connections_broke(inference: Inference, data: DataManager) -> Inference | None:
    """No rank failed by itself, and nothing else was found: they waited in the same place.

    Possible only: what broke the connections is not told. No node is held at fault.
    """
    if len(_waits(data)) > 1 or never_met(inference, data) is not None:
        return None
    log = data.get(TrainingLog)
    if log is not None and log.adapters:
        return _adapters(inference, log.adapters)
    errors = [each.error for each in log.failures if each.error] if log else []
    if errors and all(map(_STUCK.search, errors)):
        return _stuck(inference)
    if errors and all(map(_OF_A_TIME_LIMIT.search, errors)):
        return _timed_out(inference)
    return Inference(
        name="connections-broke",
        description="connections between ranks broke or timed out; which node was the cause"
        " is not in what was collected",
        attribution=Attribution.TRANSIENT,
        sureness=Sureness.POSSIBLE,
        ranks=inference.ranks,
        evidence=inference.evidence,
        advice="start again; the check before the script tests these nodes' connections",
    )


def _timed_out(inference: Inference) -> Inference:
    return Inference(
        name="collective-timed-out",
        description="ranks waited in a collective until NCCL's watchdog ended them; which rank did"
        " not come to it, or which connection carried nothing, is not in what was collected",
        sureness=Sureness.POSSIBLE,
        ranks=inference.ranks,
        evidence=inference.evidence,
        advice="start again with --flight-recorder=on, which tells it of the next hang; the check"
        " before the script tests these nodes' connections",
    )


def _stuck(inference: Inference) -> Inference:
    """Tell of watchdogs that got nowhere themselves: no collective is known to be late."""
    return Inference(
        name="watchdog-stuck",
        description="PyTorch ended ranks because NCCL's watchdog got nowhere: a call of CUDA or"
        " NCCL did not come back, or a thread of the program kept Python's lock (the GIL)",
        sureness=Sureness.POSSIBLE,
        ranks=inference.ranks,
        evidence=inference.evidence,
        advice="start again with --flight-recorder=on; if it happens again, look at the stacks of"
        " all threads before the ranks end (py-spy dump --native)",
    )


def _adapters(inference: Inference, told: Sequence[tuple[str, str]]) -> Inference:
    """Tell of errors of adapters. One that sends in vain says as much of its peer and the way."""
    ports = tuple(sorted({node for node, what in told if " async " in what}))
    where = f" of {listed(ports)}" if ports else ""
    return Inference(
        name="adapter-errors",
        description=f"network adapters reported errors{where} before the ranks gave up: a port, a"
        " cable or a switch failed, or a peer had ended",
        sureness=Sureness.POSSIBLE,
        ranks=inference.ranks,
        nodes=ports,
        evidence=(
            *(f"NCCL on {node}: {what}" for node, what in told[:MOST_LINES]),
            *inference.evidence[:1],
        ),
        advice="look at the state and the counters of the adapters (ibstat, rdma statistic) and at"
        " which rank ended first; the check before the script tests these nodes' connections",
    )


def _waits(data: DataManager) -> dict[str, list[RankFailure]]:
    """Return the ranks by the collective that they waited in, where that is known."""
    log = data.get(TrainingLog)
    waits: dict[str, list[RankFailure]] = {}
    for each in log.failures if log else ():
        if each.waits_in and each.rank is not None:
            waits.setdefault(each.waits_in, []).append(each)
    return waits


def _nodes_of(ranks: Sequence[int], data: DataManager) -> tuple[str, ...]:
    """Return where ranks run, as far as that was seen, or told at their end."""
    seen, log = data.get(Standstill), data.get(TrainingLog)
    told = {each.rank: each.node for each in (log.failures if log else ())}
    told |= {each.rank: each.node for each in (seen.ranks if seen else ())}
    return tuple(sorted({node for rank, node in told.items() if rank in ranks and node}))


def data_ended_before(_: Inference, data: DataManager) -> Inference | None:
    """The data of some ranks has ended, and that of the others has given more.

    They tell of their data, and wait in different collectives. It is the fewer: those whose data
    ended before, or those that go on.
    """
    ended = _ended(data)
    sureness = _parted(data) if ended else None
    if sureness is None:
        return None
    others = [each for each in _ranks(data) if each not in ended]
    few = min(ended, others, key=len)
    batches = f"{ended[0].batches} batch{'es' if ended[0].batches != 1 else ''}"
    rest = ranks_text(ranks_of(others if few is ended else ended))
    if few is ended:
        is_ = "is" if len(few) == 1 else "are"
        what = f"{is_} behind {rest}: the data there ended after {batches}"
    else:
        goes = "goes" if len(few) == 1 else "go"
        what = f"{goes} on with batch {others[0].batches}: the data of {rest} ended before"
    return Inference(
        name=OUT_OF_STEP,
        description=f"{who(few)} {what}",
        attribution=Attribution.USER,
        sureness=sureness,
        nodes=nodes_of(few),
        ranks=ranks_of(few),
        evidence=tuple(map(_line, [*few, *(e for e in _ranks(data) if e not in few)]))[:MOST_LINES],
        advice=_MORE_BATCHES,
    )


def out_of_step(difference: Difference, nodes: Sequence[str]) -> Inference:
    """Return what a Flight Recorder shows of ranks that called what every step has."""
    several = len(difference.ranks) > 1
    are, leave = ("are", "these ranks leave") if several else ("is", "this rank leaves")
    return Inference(
        name=OUT_OF_STEP,
        description=f"{ranks_text(difference.ranks)} {are} not at the step of the others:"
        f" {difference.description}",
        attribution=Attribution.USER,
        sureness=Sureness.LIKELY,
        nodes=tuple(nodes),
        ranks=difference.ranks,
        evidence=difference.evidence,
        advice=f"{_MORE_BATCHES}; or check whether {leave} out what the others call",
    )


def _ranks(data: DataManager) -> tuple[RankSample, ...]:
    seen = data.get(Standstill)
    return seen.ranks if seen else ()


def _ended(data: DataManager) -> list[RankSample]:
    """Return the ranks whose data ended before that of all others, where all tell of it."""
    ranks = _ranks(data)
    ended = [each for each in ranks if each.data_ended and not each.gone]
    others = [each for each in ranks if not each.data_ended]
    if not ended or not others or not all(each.batches for each in ranks):
        return []
    # An end that all meet after as many batches is an epoch's.
    last = max(each.batches for each in ended)
    alike = all(each.batches == last for each in ended)
    return ended if alike and all(each.batches > last for each in others) else []


def _parted(data: DataManager) -> Sureness | None:
    """Return how sure it is that ranks are in different collectives, None where they may not be.

    A rank that is in none may have to do more than the others, as one that evaluates. Below `Join`,
    uneven data is as it should be.
    """
    stacks = [each.stack for each in _ranks(data)]
    if any(frame.file.endswith(_JOIN) for stack in stacks for frame in stack):
        return None
    flight = data.get(FlightRecords)
    difference = first_difference(flight.records) if flight else None
    if difference is not None:
        return Sureness.CERTAIN if difference.mismatched else None
    places = list(map(place_of, stacks))
    inside = all(each.doing is Doing.COLLECTIVE for each in places)
    return Sureness.LIKELY if inside and len({each.what for each in places}) > 1 else None


def _line(seen: RankSample) -> str:
    ended = ", and then ended" if seen.data_ended else ""
    return f"rank {seen.rank} on {seen.node}: its data gave {seen.batches} batches{ended}"
