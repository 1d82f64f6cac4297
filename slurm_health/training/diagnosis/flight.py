# SPDX-License-Identifier: Apache-2.0
"""Where ranks parted, by PyTorch's Flight Recorder: each rank's latest collectives, numbered.

Ranks of a process group number its collectives alike, so the same number must be the same
collective with the same sizes. Where all called the same, who holds up the others is found from
group to group (`flight_waits`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_health.records.text import ranks_text
from slurm_health.training.diagnosis.flight_data import FlightRecord, Operation
from slurm_health.training.diagnosis.flight_waits import Culprit, Why, culprits

# The recorded collectives by group, rank and number.
_Groups = Mapping[str, Mapping[int, Mapping[int, Operation]]]
_SHOWN = 4
_REPEATED = 2  # a collective that all ranks have called so often is one that their steps have


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first collective in which ranks differ; `ranks` are the fewer.

    `mismatched`: they called something else. Otherwise they never entered it. `of_a_step`: what
    they called, all ranks had called again and again, so that they may only be at another step.
    """

    mismatched: bool
    of_a_step: bool = False
    ranks: tuple[int, ...]
    description: str
    evidence: tuple[str, ...]


def first_difference(records: Sequence[FlightRecord]) -> Difference | None:
    """Return where ranks parted, None where all that is recorded agrees, or leaves it open."""
    groups: dict[str, dict[int, dict[int, Operation]]] = {}
    for record in records:
        for operation in record.operations:
            of_rank = groups.setdefault(operation.group, {}).setdefault(record.rank, {})
            of_rank[operation.sequence] = operation
    for group, by_rank in sorted(groups.items()):
        if len(by_rank) > 1 and (found := _mismatch(group, by_rank)):
            return found
    missing = culprits(records)
    return _absence(missing, groups) if missing else None


def _mismatch(group: str, by_rank: Mapping[int, Mapping[int, Operation]]) -> Difference | None:
    for sequence in sorted({number for each in by_rank.values() for number in each}):
        called = {rank: each[sequence] for rank, each in by_rank.items() if sequence in each}
        kinds = Counter((each.what, each.sizes) for each in called.values())
        if len(kinds) < 2:
            continue
        usual = kinds.most_common(1)[0][0]
        ranks = tuple(sorted(r for r, each in called.items() if (each.what, each.sizes) != usual))
        other = called[ranks[0]]
        return Difference(
            mismatched=True,
            of_a_step=len(kinds) == 2 and _repeated(other, by_rank, sequence),
            ranks=ranks,
            description=f"{ranks_text(ranks)} called {_named(other)} as collective {sequence} of"
            f" group {group}, while {ranks_text([r for r in called if r not in ranks])} called"
            f" {_named_by(*usual)}",
            evidence=_evidence(called, ranks),
        )
    return None


def _repeated(
    called: Operation, by_rank: Mapping[int, Mapping[int, Operation]], sequence: int
) -> bool:
    """Tell whether every rank has called it again and again, about as often as anything else.

    What only the end of an epoch has is called more seldom.
    """
    for operations in by_rank.values():
        kinds = Counter(
            (each.what, each.sizes) for number, each in operations.items() if number < sequence
        )
        most = max(kinds.values(), default=0)
        if kinds[called.what, called.sizes] < max(_REPEATED, most / 2):
            return False
    return True


def _absence(missing: Sequence[Culprit], groups: _Groups) -> Difference:
    """Return the ranks that hold up the others, each told with those that it shares a work with."""
    alike: dict[tuple[object, ...], list[Culprit]] = {}
    for each in missing:
        alike.setdefault((each.why, each.group, each.sequence, each.waiting), []).append(each)
    told = [_told(each, groups) for each in alike.values()]
    calls = {
        rank: found
        for each in missing
        for rank in (each.rank, *each.waiting)
        if (found := groups.get(each.group, {}).get(rank, {}).get(each.sequence))
    }
    return Difference(
        mismatched=False,
        ranks=tuple(each.rank for each in missing),
        description="; ".join([*told[:_SHOWN], *(["and more"] if told[_SHOWN:] else [])]),
        evidence=_evidence(calls, [each.rank for each in missing if each.rank in calls]),
    )


def _told(alike: Sequence[Culprit], groups: _Groups) -> str:
    first = alike[0]
    ranks = ranks_text([each.rank for each in alike])
    others = ranks_text(first.waiting)
    wait = "waits" if len(first.waiting) == 1 else "wait"
    called = [each.get(first.sequence) for each in groups.get(first.group, {}).values()]
    what = next((f" ({_named(each)})" for each in called if each), "")
    work = f"collective {first.sequence} of group {first.group}{what}"
    if not first.group:
        work = "a transfer with it"
    match first.why:
        case Why.NOT_RECORDED:
            return f"nothing is recorded of {ranks}, while {others} {wait} in {work}"
        case Why.NO_TRANSFER:
            side = "its side" if len(alike) == 1 else "their sides"
            return f"{ranks} never began {side} of a transfer that {others} {wait} for"
        case Why.DEVICE_BEHIND:
            return f"on {ranks}, {work} is not over, and {others} left it collectives ago"
        case Why.NEVER_ENTERED:
            return f"{ranks} never entered {work}, in which {others} waited"


def _evidence(called: Mapping[int, Operation], first: Sequence[int]) -> tuple[str, ...]:
    order = [*first, *(rank for rank in sorted(called) if rank not in first)]
    return tuple(
        f"flight recorder: rank {rank}: collective {called[rank].sequence},"
        f" {_named(called[rank])}, {called[rank].state or 'state unknown'}"
        for rank in order[:_SHOWN]
    )


def _named(operation: Operation) -> str:
    return _named_by(operation.what, operation.sizes)


def _named_by(what: str, sizes: str) -> str:
    return f"{what} {sizes}".strip()
