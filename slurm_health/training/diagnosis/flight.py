# SPDX-License-Identifier: Apache-2.0
"""Where ranks parted, by PyTorch's Flight Recorder: each rank's latest collectives, numbered.

Ranks of a process group number its collectives alike, so the same number must be the same
collective with the same sizes.

Where all called the same, who holds up the others is followed from group to group. The host
enqueues works long before the device does them, so the highest number says nothing. What counts in
a group is its first work that is not over on any rank: a rank that has not entered it holds up
those that have. One that is missing in one group often waits in another: only a rank that is
missing somewhere and waits nowhere is named. Where ranks wait for each other in a circle, or all
are in one work and none leaves it, the records name no rank.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_health.records.text import ranks_text
from slurm_health.training.diagnosis.flight_data import FlightRecord, Operation, Reached, reached_of

# A group's name with the library, and its ranks: torch calls groups that are made together, and
# have no rank in common, alike.
_Group = tuple[str, tuple[int, ...]]
# The recorded collectives by group, rank and number.
_Groups = Mapping[_Group, Mapping[int, Mapping[int, Operation]]]
_SHOWN = 4
_REPEATED = 2  # a collective that all ranks have called so often is one that their steps have
_NOWHERE = Reached()


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
    groups: dict[_Group, dict[int, dict[int, Operation]]] = {}
    names = _Names(records)
    for record in records:
        for operation in record.operations:
            group = names.group(record, operation.group)
            of_rank = groups.setdefault(group, {}).setdefault(record.rank, {})
            of_rank[operation.sequence] = operation
    for (name, _), by_rank in sorted(groups.items()):
        if len(by_rank) > 1 and (found := _mismatch(name, by_rank)):
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
        key = (each.why, each.key, each.sequence, each.waiting)
        alike.setdefault(key, []).append(each)
    told = [_told(each, groups) for each in alike.values()]
    calls = {
        rank: found
        for each in missing
        for rank in (each.rank, *each.waiting)
        if (found := groups.get(each.key, {}).get(rank, {}).get(each.sequence))
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
    called = [each.get(first.sequence) for each in groups.get(first.key, {}).values()]
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


class Why(enum.Enum):
    """What shows that a rank holds others up."""

    NEVER_ENTERED = "it has not entered a collective in which others wait"
    NO_TRANSFER = "it has not begun the send or the receive that another waits for"
    NOT_RECORDED = "nothing is recorded of it, and others wait in a group of it"
    DEVICE_BEHIND = "its device has not left what others left collectives ago"


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A rank that holds up the ranks `waiting`, in a work of a group; no group of a transfer.

    `members`: all ranks of the group, where they are known.
    """

    rank: int
    why: Why
    group: str = ""
    members: tuple[int, ...] = ()
    sequence: int = -1
    waiting: tuple[int, ...] = ()

    @property
    def key(self) -> _Group:
        """Which group it is."""
        return self.group, self.members


@dataclass
class _Waits:
    """Who waits for whom; `inside` are in a work that no rank has left."""

    missing: dict[int, Culprit] = field(default_factory=dict)
    behind: dict[int, Culprit] = field(default_factory=dict)
    waits_for: dict[int, set[int]] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)

    def add(self, culprit: Culprit) -> None:
        self.missing.setdefault(culprit.rank, culprit)
        for rank in culprit.waiting:
            self.waits_for.setdefault(rank, set()).add(culprit.rank)


def culprits(records: Sequence[FlightRecord]) -> tuple[Culprit, ...]:
    """Return the ranks that hold the others up, none where the records do not tell."""
    by_rank = {each.rank: each.reached or reached_of(each.operations) for each in records}
    recorded = {
        each.rank for each in records if by_rank[each.rank] or each.transfers or each.exchanged
    }
    unknown = {each.rank for each in records if not each.whole}
    waits = _Waits()
    for group, reached in sorted(_groups(records).items()):
        others = set(group[1]) - reached.keys() - unknown
        _of_group(waits, group, reached, others, recorded)
    _of_transfers(waits, records, recorded, unknown)
    held = {rank for rank, others in waits.waits_for.items() if others} | waits.inside
    found = [each for rank, each in sorted(waits.missing.items()) if rank not in held]
    silent = [each for each in found if each.why is Why.NOT_RECORDED]
    # Where most left none, their dumps are only not where we look.
    if len(silent) >= len(recorded):
        found = [each for each in found if each.why is not Why.NOT_RECORDED]
    named = {each.rank for each in found}
    found += [each for rank, each in sorted(waits.behind.items()) if rank not in named]
    return tuple(found)


def _groups(records: Sequence[FlightRecord]) -> dict[_Group, dict[int, Reached]]:
    names = _Names(records)
    groups: dict[_Group, dict[int, Reached]] = {}
    for record in records:
        for name, each in (record.reached or reached_of(record.operations)).items():
            groups.setdefault(names.group(record, name), {})[record.rank] = each
    return groups


class _Names:
    """Which group a rank means by a name; of many records one tells who is in a group."""

    def __init__(self, records: Sequence[FlightRecord]) -> None:
        self._told: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
        self._of_rank: dict[tuple[str, int], tuple[int, ...]] = {}
        for record in records:
            for name, ranks in record.members.items():
                told = self._told.setdefault(name, {})
                if ranks not in told:
                    told[ranks] = tuple(sorted(ranks))
                    for rank in ranks:
                        self._of_rank.setdefault((name, rank), told[ranks])

    def group(self, record: FlightRecord, name: str) -> _Group:
        """Return the group that the record of a rank calls so."""
        without_library = name.partition(" (")[0]
        told = self._told.get(without_library, {})
        if without_library in record.members:
            return name, told[record.members[without_library]]
        found = self._of_rank.get((without_library, record.rank))
        if found is None and len(told) == 1:
            (found,) = told.values()
        return name, found or ()


def _of_group(
    waits: _Waits,
    group: _Group,
    reached: Mapping[int, Reached],
    others: Iterable[int],
    recorded: set[int],
) -> None:
    """Find who is missing in a group's first work that no rank has left; `others` used none."""
    over = max(each.over for each in reached.values())
    _behind(waits, group, reached, over)
    first = {
        rank: max(each.inside[0], over + 1)
        for rank, each in reached.items()
        if each.inside and each.inside[1] > over
    }
    waits.inside |= first.keys()
    if not first:
        return
    sequence = min(first.values())
    waiting = tuple(sorted(rank for rank, number in first.items() if number == sequence))
    for rank in sorted((*reached, *others)):
        here = reached.get(rank, _NOWHERE)
        if here.entered >= sequence:
            continue
        if here.inside and here.inside[0] == over:
            waits.inside.add(rank)  # held up in what others have left, as where a path loses data
            continue
        why = Why.NEVER_ENTERED if rank in recorded else Why.NOT_RECORDED
        name, members = group
        culprit = Culprit(
            rank=rank, why=why, group=name, members=members, sequence=sequence, waiting=waiting
        )
        waits.add(culprit)


def _behind(waits: _Waits, group: _Group, reached: Mapping[int, Reached], over: int) -> None:
    """Find ranks whose device did its part, or others would not be on, and that do not see it."""
    left = tuple(sorted(rank for rank, each in reached.items() if each.over == over))
    for rank, each in reached.items():
        if each.inside and each.inside[0] < over:
            culprit = Culprit(
                rank=rank,
                why=Why.DEVICE_BEHIND,
                group=group[0],
                members=group[1],
                sequence=each.inside[0],
                waiting=left,
            )
            waits.behind.setdefault(rank, culprit)


def _of_transfers(
    waits: _Waits, records: Sequence[FlightRecord], recorded: set[int], unknown: set[int]
) -> None:
    """Find who has not begun its side of a send or a receive that another has begun.

    The record of a peer that has lost its oldest entries shows that only where it goes back to an
    earlier one of the same: a later one would be there too.
    """
    begun = {(each.rank, to.peer, to.sends) for each in records for to in each.transfers}
    certain = {
        (each.rank, to.peer, to.sends) for each in records for to in each.transfers if to.certain
    }
    kept = {(each.rank, to.peer, to.sends) for each in records for to in each.exchanged}
    for rank, peer, sends in sorted(certain):
        if rank in waits.behind:
            continue
        other = (peer, rank, not sends)
        if other in begun:
            waits.inside |= {rank, peer}  # both have begun: one of their devices is held up before
            continue
        if peer in unknown and other not in kept:
            waits.inside.add(rank)
            continue
        why = Why.NO_TRANSFER if peer in recorded else Why.NOT_RECORDED
        waits.add(Culprit(rank=peer, why=why, waiting=(rank,)))
