# SPDX-License-Identifier: Apache-2.0
"""How far ranks came in their collectives, by all sources, and which rank holds the others up.

Sources are dumps of PyTorch's Flight Recorder, the lines and reports of NCCL's watchdog, and NCCL's
own answer (RAS). The ranks of a process group number its collectives alike, so the same number must
be the same collective with the same sizes. Sources number differently, so every source has groups
of its own in the one graph of waits.

The host enqueues works long before the device does them, so the highest number means nothing. A
group is held up at its first work that is not over on any rank, by the ranks that have not entered
it. A rank that is missing in one group often waits in another: only a rank that is missing
somewhere and waits nowhere is named. If ranks wait for each other in a circle, or all are in one
work and none leaves it, no rank is named.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from slurm_health.records.script_records import MOST_LINES
from slurm_health.records.text import listed, ranks_text

# PyTorch's purposes for groups whose script gives none.
NO_PURPOSE = {None, "", "default_pg", "undefined"}
_OVER = {"completed", "retired"}
STAND_IN = 1 << 20  # from here on, numbers of ranks with an unknown number in the training
_REPEATED = 2  # a collective that all ranks have called so often is part of their steps


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One collective in a rank's Flight Recorder; `sequence` counts within its group."""

    group: str
    sequence: int
    what: str
    sizes: str = ""
    state: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the device has left it."""
        return self.state in _OVER

    @property
    def named(self) -> str:
        """Its name, with its sizes."""
        return f"{self.what} {self.sizes}".strip()


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """A send to rank `peer`, or a receive from it; not `certain` if it may be over."""

    peer: int
    sends: bool
    certain: bool = True


class Reached(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank came in one group; -1 is unknown.

    Works are numbered within their group. `entered` is the last one that the rank called, `over`
    the last one that its device has left, `inside` those between that are not over: first, last.
    """

    entered: int = -1
    over: int = -1
    inside: tuple[int, int] | None = None


class FlightRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How far one rank came, by one source or several.

    `operations` are its latest collectives, oldest first. `members` has all ranks of its known
    process groups, with or without a record; `reached` is how far it came by group, even if
    `operations` had to leave some out. `transfers` are not over, `exchanged` are over by an entry.
    `whole`: no older entry was overwritten, so a group without one was not used. An empty record
    that is not whole is that of an unreadable dump. `unclaimed`: it was at the path that all
    trainings of the user share. `host` is the rank's, `lines` are evidence of a source without
    single collectives.
    """

    rank: int
    operations: tuple[Operation, ...] = ()
    members: dict[str, tuple[int, ...]] = {}
    reached: dict[str, Reached] = {}
    transfers: tuple[Transfer, ...] = ()
    exchanged: tuple[Transfer, ...] = ()
    whole: bool = True
    unclaimed: bool = False
    host: str = ""
    lines: tuple[str, ...] = ()

    @property
    def groups(self) -> dict[str, Reached]:
        """How far it came, by group."""
        return self.reached or reached_of(self.operations)


def reached_of(operations: Iterable[Operation]) -> dict[str, Reached]:
    """Return how far a rank came by group; its entries are ordered, oldest first."""
    reached: dict[str, Reached] = {}
    for call in operations:
        before = reached.get(call.group, Reached())
        first = before.inside[0] if before.inside else call.sequence
        reached[call.group] = Reached(
            entered=max(before.entered, call.sequence),
            over=max(before.over, call.sequence if call.is_over else first - 1),
            inside=before.inside if call.is_over else (first, call.sequence),
        )
    return reached


class Why(enum.Enum):
    """Why a rank holds others up."""

    NEVER_ENTERED = "it has not entered a collective in which others wait"
    NO_TRANSFER = "it has not begun the send or the receive that another waits for"
    NOT_RECORDED = "it has no record, and others wait in a group of it"
    DEVICE_BEHIND = "its device has not left a work that others left collectives ago"


@dataclass
class Group:
    """A process group as one source numbers its collectives, with how far its ranks came.

    Torch calls groups that are made together, and have no rank in common, alike: its `members`,
    all of its ranks if they are known, tell it apart. `calls` are by rank and number.
    """

    name: str
    members: tuple[int, ...] = ()
    reached: dict[int, Reached] = field(default_factory=dict)
    calls: dict[int, dict[int, Operation]] = field(default_factory=dict)

    def called(self, rank: int, sequence: int) -> Operation | None:
        """Return the recorded call of a rank under a number."""
        return self.calls.get(rank, {}).get(sequence)

    def mismatch(self) -> Difference | None:
        """Return the first number under which ranks called different collectives."""
        for sequence in sorted({number for calls in self.calls.values() for number in calls}):
            called = {rank: call for rank in self.calls if (call := self.called(rank, sequence))}
            kinds = Counter((call.what, call.sizes) for call in called.values())
            if len(kinds) < 2:
                continue
            usual = kinds.most_common(1)[0][0]
            ranks = tuple(sorted(r for r, c in called.items() if (c.what, c.sizes) != usual))
            others = ranks_text([rank for rank in called if rank not in ranks])
            other, usually = called[ranks[0]], " ".join(usual).strip()
            return Difference(
                mismatched=True,
                of_a_step=len(kinds) == 2 and self._repeated(other),
                ranks=ranks,
                description=f"{ranks_text(ranks)} called {other.named} as collective {sequence} of"
                f" group {self.name}, while {others} called {usually}",
                evidence=_evidence(called, ranks),
            )
        return None

    def _repeated(self, call: Operation) -> bool:
        """Return whether all ranks called it before, about as often as anything else.

        Calls at the end of an epoch are less frequent.
        """
        for calls in self.calls.values():
            before = (c for number, c in calls.items() if number < call.sequence)
            kinds = Counter((c.what, c.sizes) for c in before)
            most = max(kinds.values(), default=0)
            if kinds[call.what, call.sizes] < max(_REPEATED, most / 2):
                return False
        return True


@dataclass(frozen=True, kw_only=True, eq=False)
class Culprit:
    """A rank that holds up the ranks `waiting`, in a work of a group; no group of a transfer."""

    rank: int
    why: Why
    group: Group | None = None
    sequence: int = -1
    waiting: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first collective in which ranks differ; `ranks` are the fewer.

    `mismatched`: they called something else. Otherwise they never entered it. `of_a_step`: their
    call is part of all ranks' steps, so they may only be at another step. `counted`: no source has
    single collectives. `apart`: they are missing in different groups.
    """

    mismatched: bool
    counted: bool = False
    apart: bool = False
    of_a_step: bool = False
    ranks: tuple[int, ...]
    description: str
    evidence: tuple[str, ...]


@dataclass
class _Waits:
    """The waits of ranks; `inside` are in a work that no rank has left."""

    missing: dict[int, Culprit] = field(default_factory=dict)
    behind: dict[int, Culprit] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    inside: set[int] = field(default_factory=set)

    def add(self, culprit: Culprit) -> None:
        self.missing.setdefault(culprit.rank, culprit)
        self.waiting |= set(culprit.waiting)


class CollectiveState:
    """How far all ranks came, merged from their records, of which a rank has one per source."""

    def __init__(self, records: Iterable[FlightRecord]) -> None:
        merged: dict[int, FlightRecord] = {}
        for record in records:
            before = merged.get(record.rank)
            merged[record.rank] = record if before is None else _both(before, record)
        self.records = tuple(merged[rank] for rank in sorted(merged))
        self._groups = _groups(self.records)

    @cached_property
    def difference(self) -> Difference | None:
        """Where ranks parted, None if all records agree, or leave it open."""
        for group in self._groups:
            if len(group.calls) > 1 and (mismatch := group.mismatch()):
                return mismatch
        return self._absence() if self.culprits else None

    @cached_property
    def culprits(self) -> tuple[Culprit, ...]:
        """The ranks that hold the others up, none if the records leave that open."""
        recorded = {r.rank for r in self.records if r.groups or r.transfers or r.exchanged}
        unknown = {r.rank for r in self.records if not r.whole}
        waits = _Waits()
        for group in self._groups:
            if group.reached:
                others = set(group.members) - group.reached.keys() - unknown
                _find_missing(waits, group, others, recorded)
        self._find_transfers(waits, recorded, unknown)
        held = waits.waiting | waits.inside
        missing = [culprit for rank, culprit in sorted(waits.missing.items()) if rank not in held]
        silent = [culprit for culprit in missing if culprit.why is Why.NOT_RECORDED]
        if len(silent) >= len(recorded):  # their dumps are in a place that is not read
            missing = [culprit for culprit in missing if culprit not in silent]
        ranks = {culprit.rank for culprit in missing}
        behind = (culprit for rank, culprit in sorted(waits.behind.items()) if rank not in ranks)
        return (*missing, *behind)

    def _find_transfers(self, waits: _Waits, recorded: set[int], unknown: set[int]) -> None:
        """Find ranks that have not begun their side of a send or a receive of another rank.

        The record of a peer that has lost its oldest entries shows that only if it goes back to an
        earlier one of the same kind.
        """
        open_ = [(record.rank, to) for record in self.records for to in record.transfers]
        begun = {(rank, to.peer, to.sends) for rank, to in open_}
        kept = {(r.rank, to.peer, to.sends) for r in self.records for to in r.exchanged}
        for rank, peer, sends in sorted({(r, to.peer, to.sends) for r, to in open_ if to.certain}):
            other = (peer, rank, not sends)
            if rank in waits.behind:
                continue
            if other in begun:  # both have begun: an earlier work holds up one of their devices
                waits.inside |= {rank, peer}
            elif peer in unknown and other not in kept:
                waits.inside.add(rank)
            else:
                why = Why.NO_TRANSFER if peer in recorded else Why.NOT_RECORDED
                waits.add(Culprit(rank=peer, why=why, waiting=(rank,)))

    def _absence(self) -> Difference:
        """Return the ranks that hold up the others as a `Difference`."""
        alike: dict[tuple[object, ...], list[Culprit]] = {}
        calls: dict[int, Operation] = {}
        shown: dict[int, None] = dict.fromkeys(culprit.rank for culprit in self.culprits)
        for culprit in self.culprits:
            group, sequence = culprit.group, culprit.sequence
            alike.setdefault((culprit.why, id(group), sequence, culprit.waiting), []).append(
                culprit
            )
            for rank in (culprit.rank, *culprit.waiting):
                shown.setdefault(rank)
                if call := group and group.called(rank, sequence):
                    calls[rank] = call
        texts = [self._text(culprits) for culprits in alike.values()]
        ranks = [culprit.rank for culprit in self.culprits]
        evidence = _evidence(calls, [rank for rank in ranks if rank in calls])
        if not calls:
            lines = {record.rank: record.lines for record in self.records}
            evidence = tuple(line for rank in shown for line in lines.get(rank, ()))[:MOST_LINES]
        return Difference(
            mismatched=False,
            counted=not calls,
            apart=len({id(culprit.group) for culprit in self.culprits}) > 1,
            ranks=tuple(rank for rank in ranks if rank < STAND_IN),
            description="; ".join(texts[:MOST_LINES] + ["and more"] * (len(texts) > MOST_LINES)),
            evidence=evidence,
        )

    def _text(self, alike: Sequence[Culprit]) -> str:
        first, group = alike[0], alike[0].group
        ranks, others = self._named([c.rank for c in alike]), self._named(first.waiting)
        wait = "waits" if len(first.waiting) == 1 else "wait"
        work = "a transfer with it"
        if group:
            calls = (group.called(rank, first.sequence) for rank in group.calls)
            what = next((f" ({call.named})" for call in calls if call), "")
            work = f"collective {first.sequence} of group {group.name}{what}"
        match first.why:
            case Why.NOT_RECORDED:
                return f"there is no record of {ranks}, while {others} {wait} in {work}"
            case Why.NO_TRANSFER:
                side = "its side" if len(alike) == 1 else "their sides"
                return f"{ranks} never began {side} of a transfer that {others} {wait} for"
            case Why.DEVICE_BEHIND:
                return f"{ranks} never finished {work}; {others} left it collectives ago"
            case Why.NEVER_ENTERED:
                return f"{ranks} never entered {work}, in which {others} waited"

    def _named(self, ranks: Sequence[int]) -> str:
        """Return ranks in words; those without a number in the training by their hosts."""
        known = [rank for rank in ranks if rank < STAND_IN]
        hosts = {record.rank: record.host for record in self.records}
        where = sorted({hosts.get(rank, "") for rank in ranks if rank >= STAND_IN} - {""})
        others = len(ranks) - len(known)
        parts = [ranks_text(known)] if known else []
        if where:
            parts.append(f"{'a rank' if others == 1 else 'ranks'} on {listed(where)}")
        elif others:
            parts.append("the others")
        return " and ".join(parts)


def _groups(records: Sequence[FlightRecord]) -> list[Group]:
    """Return all groups, by name and members, with the progress and calls of their ranks.

    Only one of many records has the ranks of a group. A name may have the library behind it.
    """
    known: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    of_rank: dict[tuple[str, int], tuple[int, ...]] = {}
    for record in records:
        for name, ranks in record.members.items():
            of_name = known.setdefault(name, {})
            if ranks not in of_name:
                of_name[ranks] = tuple(sorted(ranks))
                for rank in ranks:
                    of_rank.setdefault((name, rank), of_name[ranks])
    groups: dict[tuple[str, tuple[int, ...]], Group] = {}

    def group(record: FlightRecord, name: str) -> Group:
        plain = name.partition(" (")[0]
        of_name = known.get(plain, {})
        members = of_rank.get((plain, record.rank), ())
        if plain in record.members:
            members = of_name[record.members[plain]]
        elif not members and len(of_name) == 1:
            (members,) = of_name.values()
        return groups.setdefault((name, members), Group(name, members))

    for record in records:
        for name, reached in record.groups.items():
            group(record, name).reached[record.rank] = reached
        for call in record.operations:
            group(record, call.group).calls.setdefault(record.rank, {})[call.sequence] = call
    return [groups[key] for key in sorted(groups)]


def _both(one: FlightRecord, other: FlightRecord) -> FlightRecord:
    """Return the record of a rank by two sources, whose groups differ."""
    return msgspec.structs.replace(
        one,
        operations=(*one.operations, *other.operations),
        members={**other.members, **one.members},
        reached={**other.groups, **one.groups},
        transfers=(*one.transfers, *other.transfers),
        exchanged=(*one.exchanged, *other.exchanged),
        whole=one.whole or other.whole,
        host=one.host or other.host,
        lines=(*one.lines, *other.lines),
    )


def _find_missing(waits: _Waits, group: Group, others: Iterable[int], recorded: set[int]) -> None:
    """Find the ranks that are missing in a group's first work that no rank has left.

    `others` have no work in the group. A rank is behind if it has not left a work that others have:
    its device did its part there, and does not notice it.
    """
    over = max(reached.over for reached in group.reached.values())
    left = tuple(sorted(rank for rank, reached in group.reached.items() if reached.over == over))
    first: dict[int, int] = {}  # the first work that a rank is in and none has left
    for rank, reached in group.reached.items():
        if reached.inside and reached.inside[0] < over:
            culprit = Culprit(
                rank=rank,
                why=Why.DEVICE_BEHIND,
                group=group,
                sequence=reached.inside[0],
                waiting=left,
            )
            waits.behind.setdefault(rank, culprit)
        if reached.inside and reached.inside[1] > over:
            first[rank] = max(reached.inside[0], over + 1)
    if not first:
        return
    waits.inside |= first.keys()
    sequence = min(first.values())
    waiting = tuple(sorted(rank for rank, number in first.items() if number == sequence))
    for rank in sorted((*group.reached, *others)):
        reached = group.reached.get(rank, Reached())
        if reached.entered >= sequence:
            continue
        if reached.inside and reached.inside[0] == over:
            waits.inside.add(rank)  # held up in a work that others have left: a path may lose data
            continue
        why = Why.NEVER_ENTERED if rank in recorded else Why.NOT_RECORDED
        waits.add(Culprit(rank=rank, why=why, group=group, sequence=sequence, waiting=waiting))


def _evidence(called: Mapping[int, Operation], first: Sequence[int]) -> tuple[str, ...]:
    order = [*first, *(rank for rank in sorted(called) if rank not in first)]
    return tuple(
        f"flight recorder: rank {rank}: collective {called[rank].sequence},"
        f" {called[rank].named}, {called[rank].state or 'state unknown'}"
        for rank in order[:MOST_LINES]
    )
