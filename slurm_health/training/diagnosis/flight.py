# SPDX-License-Identifier: Apache-2.0
"""Where ranks parted, by PyTorch's Flight Recorder: each rank's latest collectives, numbered.

Ranks of a process group number its collectives alike, so the same number must be the same
collective with the same sizes; and a rank without a number that others wait in never entered it.
Who is in a group, the record of any of its ranks tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_health.records.text import ranks_text
from slurm_health.training.diagnosis.collected import FlightRecord, Operation

_OVER = {"completed", "retired"}
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
    """Return where ranks parted, None where all that is recorded agrees."""
    groups: dict[str, dict[int, dict[int, Operation]]] = {}
    for record in records:
        for operation in record.operations:
            of_rank = groups.setdefault(operation.group, {}).setdefault(record.rank, {})
            of_rank[operation.sequence] = operation
    for judge in (_mismatch, _absence):
        for group, by_rank in sorted(groups.items()):
            if len(by_rank) > 1 and (found := judge(group, by_rank)):
                return found
    recorded = {record.rank for record in records}
    for group, by_rank in sorted(groups.items()):
        if found := _without_record(group, by_rank, _members(group, records) - recorded):
            return found
    return None


def _members(group: str, records: Sequence[FlightRecord]) -> set[int]:
    """Return all ranks of a group, as far as any record knows them."""
    name = group.partition(" (")[0]  # without the library
    return {rank for record in records for rank in record.members.get(name, ())}


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


def _absence(group: str, by_rank: Mapping[int, Mapping[int, Operation]]) -> Difference | None:
    last = {rank: max(each) for rank, each in by_rank.items()}
    sequence = max(last.values())
    waiting = {rank: each[sequence] for rank, each in by_rank.items() if last[rank] == sequence}
    absent = tuple(
        rank
        for rank in sorted(by_rank)
        if last[rank] < sequence and not _is_inside(by_rank, rank, last[rank])
    )
    if not absent or all(is_over(each) for each in waiting.values()):
        return None
    waits = next(each for each in waiting.values() if not is_over(each))
    return Difference(
        mismatched=False,
        ranks=absent,
        description=f"{ranks_text(absent)} never entered collective {sequence} of group {group}"
        f" ({_named(waits)}), in which {ranks_text(tuple(waiting))} waited",
        evidence=_evidence(waiting, ()),
    )


def _without_record(
    group: str, by_rank: Mapping[int, Mapping[int, Operation]], missing: set[int]
) -> Difference | None:
    """Return the members of whom nothing is recorded, while all others wait in one collective.

    A process that is stopped or gone leaves no dump. Where most left none, their dumps are only
    not where we look.
    """
    last = {rank: each[max(each)] for rank, each in by_rank.items()}
    waiting = {rank: each for rank, each in last.items() if not is_over(each)}
    alike = len({each.sequence for each in waiting.values()}) == 1
    if not 0 < len(missing) < len(waiting) or len(waiting) < len(last) or not alike:
        return None
    ranks = tuple(sorted(missing))
    waits = next(iter(waiting.values()))
    return Difference(
        mismatched=False,
        ranks=ranks,
        description=f"nothing is recorded of {ranks_text(ranks)}, while all others of group"
        f" {group} wait in collective {waits.sequence} ({_named(waits)})",
        evidence=_evidence(waiting, ()),
    )


def _is_inside(by_rank: Mapping[int, Mapping[int, Operation]], rank: int, sequence: int) -> bool:
    """Tell whether a rank is held up in a collective that another one has left."""
    others = [each[sequence] for each in by_rank.values() if sequence in each]
    return not is_over(by_rank[rank][sequence]) and any(map(is_over, others))


def is_over(operation: Operation) -> bool:
    """Tell whether the device has left a collective."""
    return operation.state in _OVER


def _evidence(called: Mapping[int, Operation], first: Sequence[int]) -> tuple[str, ...]:
    order = [*first, *(rank for rank in sorted(called) if rank not in first)]
    return tuple(
        f"flight recorder: rank {rank}: collective {called[rank].sequence},"
        f" {_named(called[rank])}, {called[rank].state or 'state not told'}"
        for rank in order[:_SHOWN]
    )


def _named(operation: Operation) -> str:
    return _named_by(operation.what, operation.sizes)


def _named_by(what: str, sizes: str) -> str:
    return f"{what} {sizes}".strip()
