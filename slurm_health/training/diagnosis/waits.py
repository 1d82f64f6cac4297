# SPDX-License-Identifier: Apache-2.0
"""Ranks that waited for each other, and in what; the data of some may have ended before.

That is seen where ranks tell how many batches their data gave. Where they do not, a rank is out of
step that calls what every step has while the others call something else.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_health.records.script_records import (
    MOST_LINES,
    NEVER_ENTERED,
    NO_PROGRESS,
    OUT_OF_STEP,
    SCRIPT_FAILED,
)
from slurm_health.records.text import ranks_text
from slurm_health.training.diagnosis.collected import FlightRecords, TrainingLog
from slurm_health.training.diagnosis.collectives import CollectiveState, Difference
from slurm_health.training.diagnosis.samples import (
    Doing,
    RankSample,
    Standstill,
    nodes_of,
    place_of,
    ranks_of,
    who,
)
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

_JOIN = "torch/distributed/algorithms/join.py"
_MORE_BATCHES = (
    "give all ranks as many batches (drop_last=True, a sampler that pads), or train below"
    " torch.distributed.algorithms.join.Join"
)


def flight_differs(inference: Inference, data: DataManager) -> Inference | None:
    """PyTorch's Flight Recorder shows where ranks parted.

    Who called something else, or who never entered what the others wait in.
    """
    flights = data.get(FlightRecords)
    difference = (
        CollectiveState(flights.records).difference
        if flights and len(flights.records) > 1
        else None
    )
    if difference is None:
        return None
    # Of a script that has ended, each symptom has its own.
    ended = inference.name != NO_PROGRESS
    if ended and (inference.name == SCRIPT_FAILED) != difference.mismatched:
        return None
    if difference.of_a_step:
        return out_of_step(difference, nodes_of_ranks(difference.ranks, data))
    if difference.mismatched:
        return Inference(
            name="mismatched-collective",
            description=difference.description,
            attribution=Attribution.USER,
            sureness=Sureness.CERTAIN,
            nodes=nodes_of_ranks(difference.ranks, data),
            ranks=difference.ranks,
            evidence=difference.evidence,
            advice="have all ranks call the same collectives with the same sizes in the"
            " same order, and give all as many batches",
        )
    return Inference(
        name=NEVER_ENTERED,
        description=difference.description,
        sureness=Sureness.LIKELY,
        nodes=nodes_of_ranks(difference.ranks, data),
        ranks=difference.ranks,
        evidence=difference.evidence,
        advice=f"look at what {ranks_text(difference.ranks)} did instead: the data loader,"
        " a filesystem, a GPU",
    )


def nodes_of_ranks(ranks: Sequence[int], data: DataManager) -> tuple[str, ...]:
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
    difference = CollectiveState(flight.records).difference if flight else None
    if difference is not None:
        return Sureness.CERTAIN if difference.mismatched else None
    places = list(map(place_of, stacks))
    inside = all(each.doing is Doing.COLLECTIVE for each in places)
    return Sureness.LIKELY if inside and len({each.what for each in places}) > 1 else None


def _line(seen: RankSample) -> str:
    ended = ", and then ended" if seen.data_ended else ""
    return f"rank {seen.rank} on {seen.node}: its data gave {seen.batches} batches{ended}"
