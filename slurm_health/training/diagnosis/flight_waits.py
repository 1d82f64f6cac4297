# SPDX-License-Identifier: Apache-2.0
"""Who holds the others up, by PyTorch's Flight Recorder: from group to group.

The host enqueues works long before the device does them, so the highest number says nothing. What
counts in a group is its first work that is not over on any rank: whoever has not entered it holds
up those who have. Who is missing in one group often waits in another: only who is missing somewhere
and waits nowhere is named. Where ranks wait for each other in a circle, or all are in one work and
none leaves it, the records name no rank.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_health.training.diagnosis.flight_data import FlightRecord, Reached, reached_of

_NOWHERE = Reached()


class Why(enum.Enum):
    """What shows that a rank holds others up."""

    NEVER_ENTERED = "it has not entered a collective in which others wait"
    NO_TRANSFER = "it has not begun the send or the receive that another waits for"
    NOT_RECORDED = "nothing is recorded of it, and others wait in a group of it"
    DEVICE_BEHIND = "its device has not left what others left collectives ago"


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A rank that holds up the ranks `waiting`, in a work of a group; no group of a transfer."""

    rank: int
    why: Why
    group: str = ""
    sequence: int = -1
    waiting: tuple[int, ...] = ()


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
    recorded = {each.rank for each in records if by_rank[each.rank] or each.transfers}
    unknown = {each.rank for each in records if not each.whole}
    waits = _Waits()
    members = _members(records)
    for name, reached in sorted(_groups(by_rank).items()):
        of_group = members.get(name.partition(" (")[0], set())  # without the library
        others = of_group - reached.keys() - unknown
        _of_group(waits, name, reached, others, recorded)
    _of_transfers(waits, records, recorded, unknown - recorded)
    held = {rank for rank, others in waits.waits_for.items() if others} | waits.inside
    found = [each for rank, each in sorted(waits.missing.items()) if rank not in held]
    silent = [each for each in found if each.why is Why.NOT_RECORDED]
    # Where most left none, their dumps are only not where we look.
    if len(silent) >= len(recorded):
        found = [each for each in found if each.why is not Why.NOT_RECORDED]
    named = {each.rank for each in found}
    found += [each for rank, each in sorted(waits.behind.items()) if rank not in named]
    return tuple(found)


def _groups(by_rank: Mapping[int, Mapping[str, Reached]]) -> dict[str, dict[int, Reached]]:
    groups: dict[str, dict[int, Reached]] = {}
    for rank, reached in by_rank.items():
        for name, each in reached.items():
            groups.setdefault(name, {})[rank] = each
    return groups


def _members(records: Sequence[FlightRecord]) -> dict[str, set[int]]:
    """Return all ranks of each group, as far as any record knows them."""
    members: dict[str, set[int]] = {}
    told: set[tuple[str, tuple[int, ...]]] = set()
    for record in records:
        for each in record.members.items():
            if each not in told:
                told.add(each)
                members.setdefault(each[0], set()).update(each[1])
    return members


def _of_group(
    waits: _Waits,
    name: str,
    reached: Mapping[int, Reached],
    others: Iterable[int],
    recorded: set[int],
) -> None:
    """Find who is missing in a group's first work that no rank has left; `others` used none."""
    over = max(each.over for each in reached.values())
    _behind(waits, name, reached, over)
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
        waits.add(Culprit(rank=rank, why=why, group=name, sequence=sequence, waiting=waiting))


def _behind(waits: _Waits, name: str, reached: Mapping[int, Reached], over: int) -> None:
    """Find ranks whose device did its part, or others would not be on, and that do not see it."""
    left = tuple(sorted(rank for rank, each in reached.items() if each.over == over))
    for rank, each in reached.items():
        if each.inside and each.inside[0] < over:
            culprit = Culprit(
                rank=rank,
                why=Why.DEVICE_BEHIND,
                group=name,
                sequence=each.inside[0],
                waiting=left,
            )
            waits.behind.setdefault(rank, culprit)


def _of_transfers(
    waits: _Waits, records: Sequence[FlightRecord], recorded: set[int], unknown: set[int]
) -> None:
    """Find who has not begun its side of a send or a receive that another has begun."""
    begun = {(each.rank, to.peer, to.sends) for each in records for to in each.transfers}
    for rank, peer, sends in sorted(begun):
        if rank in waits.behind:
            continue
        if (peer, rank, not sends) in begun or peer in unknown:
            waits.inside |= {rank, peer}  # both have begun: one of their devices is held up before
            continue
        why = Why.NO_TRANSFER if peer in recorded else Why.NOT_RECORDED
        waits.add(Culprit(rank=peer, why=why, waiting=(rank,)))
