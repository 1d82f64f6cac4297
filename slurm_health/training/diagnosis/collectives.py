# SPDX-License-Identifier: Apache-2.0
"""How far each rank came in its collectives, by all sources that tell of it, and who is missing.

Sources are dumps of PyTorch's Flight Recorder, the lines and reports of NCCL's watchdog, and NCCL's
own answer (RAS). The ranks of a process group number its collectives alike, so the same number must
be the same collective with the same sizes. Each source numbers in its own way, and so has groups of
its own in the one graph of who waits for whom.

The host enqueues works long before the device does them, so the highest number means nothing. What
counts in a group is its first work that is not over on any rank: a rank that has not entered it
holds up those that have. One that is missing in one group often waits in another: only a rank that
is missing somewhere and waits nowhere is named. Where ranks wait for each other in a circle, or all
are in one work and none leaves it, no rank is.
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

# What PyTorch says that a group is for, where the script has not said it.
NO_PURPOSE = {None, "", "default_pg", "undefined"}
_OVER = {"completed", "retired"}
# A group's name with the library, and its ranks: torch calls groups that are made together, and
# have no rank in common, alike.
_Group = tuple[str, tuple[int, ...]]
STAND_IN = 1 << 20  # from here on, numbers of ranks whose number in the training is not known
_REPEATED = 2  # a collective that all ranks have called so often is one that their steps have


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One collective as a rank's Flight Recorder has it; `sequence` counts within its group."""

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
        """What it is, with its sizes."""
        return f"{self.what} {self.sizes}".strip()


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """A send to rank `peer`, or a receive from it; not `certain` where it may be over."""

    peer: int
    sends: bool
    certain: bool = True


class Reached(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank came in one group: -1 where none is known.

    Works are numbered within their group. `entered` is the last one that the rank called, `over`
    the last one that its device has left, `inside` those between that are not over: first, last.
    """

    entered: int = -1
    over: int = -1
    inside: tuple[int, int] | None = None


class FlightRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How far one rank came, by one source or several.

    `operations` are its latest collectives, oldest first. `members` has all ranks of each process
    group that it knows, whether they left a record or not, `reached` how far it came in each group,
    also where `operations` had to leave some out. `transfers` are not over, `exchanged` are those
    of which an entry says that they were. `whole`: no older entry was overwritten, so that a group
    without one was not used; without any, a record that is not whole is that of a dump that could
    not be read. `unclaimed`: it lay where all trainings of the user leave theirs. `host` is where
    the rank runs, `lines` what the source says of it, if it has no single collectives.
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
        """How far it came in each group."""
        return self.reached or reached_of(self.operations)


def reached_of(operations: Iterable[Operation]) -> dict[str, Reached]:
    """Return how far a rank came in each group, by its entries there, oldest first."""
    reached: dict[str, Reached] = {}
    for each in operations:
        before = reached.get(each.group, Reached())
        first = before.inside[0] if before.inside else each.sequence
        reached[each.group] = Reached(
            entered=max(before.entered, each.sequence),
            over=max(before.over, each.sequence if each.is_over else first - 1),
            inside=before.inside if each.is_over else (first, each.sequence),
        )
    return reached


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


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first collective in which ranks differ; `ranks` are the fewer.

    `mismatched`: they called something else. Otherwise they never entered it. `of_a_step`: what
    they called, all ranks had called again and again, so that they may only be at another step.
    `counted`: no source has single collectives. `apart`: they are missing in different groups.
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
    """Who waits for whom; `inside` are in a work that no rank has left."""

    missing: dict[int, Culprit] = field(default_factory=dict)
    behind: dict[int, Culprit] = field(default_factory=dict)
    waits_for: dict[int, set[int]] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)

    def add(self, culprit: Culprit) -> None:
        self.missing.setdefault(culprit.rank, culprit)
        for rank in culprit.waiting:
            self.waits_for.setdefault(rank, set()).add(culprit.rank)


class CollectiveState:
    """How far all ranks came, merged from their records: several of a rank are several sources."""

    def __init__(self, records: Iterable[FlightRecord]) -> None:
        merged: dict[int, FlightRecord] = {}
        for record in records:
            before = merged.get(record.rank)
            merged[record.rank] = record if before is None else _both(before, record)
        self.records = tuple(merged[rank] for rank in sorted(merged))

    @cached_property
    def difference(self) -> Difference | None:
        """Where ranks parted, None where all that is known agrees, or leaves it open."""
        for (name, _), by_rank in sorted(self._operations.items()):
            if len(by_rank) > 1 and (mismatch := _mismatch(name, by_rank)):
                return mismatch
        return self._absence() if self.culprits else None

    @cached_property
    def culprits(self) -> tuple[Culprit, ...]:
        """The ranks that hold the others up, none where the records leave that open."""
        recorded = {r.rank for r in self.records if r.groups or r.transfers or r.exchanged}
        unknown = {r.rank for r in self.records if not r.whole}
        waits = _Waits()
        for group, reached in sorted(self._reached.items()):
            others = set(group[1]) - reached.keys() - unknown
            _of_group(waits, group, reached, others, recorded)
        self._of_transfers(waits, recorded, unknown)
        held = {rank for rank, others in waits.waits_for.items() if others} | waits.inside
        named = [each for rank, each in sorted(waits.missing.items()) if rank not in held]
        silent = [each for each in named if each.why is Why.NOT_RECORDED]
        if len(silent) >= len(recorded):  # their dumps are only not where we look
            named = [each for each in named if each.why is not Why.NOT_RECORDED]
        ranks = {each.rank for each in named}
        named += [each for rank, each in sorted(waits.behind.items()) if rank not in ranks]
        return tuple(named)

    @cached_property
    def _reached(self) -> dict[_Group, dict[int, Reached]]:
        groups: dict[_Group, dict[int, Reached]] = {}
        for record in self.records:
            for name, each in record.groups.items():
                groups.setdefault(self._names.group(record, name), {})[record.rank] = each
        return groups

    @cached_property
    def _operations(self) -> dict[_Group, dict[int, dict[int, Operation]]]:
        """The recorded collectives by group, rank and number."""
        groups: dict[_Group, dict[int, dict[int, Operation]]] = {}
        for record in self.records:
            for operation in record.operations:
                group = self._names.group(record, operation.group)
                of_rank = groups.setdefault(group, {}).setdefault(record.rank, {})
                of_rank[operation.sequence] = operation
        return groups

    @cached_property
    def _names(self) -> _Names:
        return _Names(self.records)

    def _of_transfers(self, waits: _Waits, recorded: set[int], unknown: set[int]) -> None:
        """Find who has not begun its side of a send or a receive that another has begun.

        The record of a peer that has lost its oldest entries shows that only where it goes back to
        an earlier one of the same: a later one would be there too.
        """
        open_ = [(r.rank, to) for r in self.records for to in r.transfers]
        begun = {(rank, to.peer, to.sends) for rank, to in open_}
        kept = {(r.rank, to.peer, to.sends) for r in self.records for to in r.exchanged}
        for rank, peer, sends in sorted({(r, t.peer, t.sends) for r, t in open_ if t.certain}):
            other = (peer, rank, not sends)
            if rank in waits.behind:
                continue
            if other in begun:  # both have begun: one of their devices is held up before
                waits.inside |= {rank, peer}
            elif peer in unknown and other not in kept:
                waits.inside.add(rank)
            else:
                why = Why.NO_TRANSFER if peer in recorded else Why.NOT_RECORDED
                waits.add(Culprit(rank=peer, why=why, waiting=(rank,)))

    def _absence(self) -> Difference:
        """Return the ranks that hold up the others, each with those that it shares a work with."""
        alike: dict[tuple[object, ...], list[Culprit]] = {}
        calls: dict[int, Operation] = {}
        shown: dict[int, None] = {}
        for each in self.culprits:
            key = (each.why, each.group, each.members, each.sequence, each.waiting)
            alike.setdefault(key, []).append(each)
            of_group = self._operations.get((each.group, each.members), {})
            for rank in (each.rank, *each.waiting):
                shown.setdefault(rank)
                if called := of_group.get(rank, {}).get(each.sequence):
                    calls[rank] = called
        texts = [self._absence_text(each) for each in alike.values()]
        ranks = tuple(each.rank for each in self.culprits)
        evidence = _evidence(calls, [rank for rank in ranks if rank in calls])
        if not calls:
            lines = {record.rank: record.lines for record in self.records}
            order = dict.fromkeys([*ranks, *shown])
            evidence = tuple(line for rank in order for line in lines.get(rank, ()))[:MOST_LINES]
        return Difference(
            mismatched=False,
            counted=not calls,
            apart=len({culprit.group for culprit in self.culprits}) > 1,
            ranks=tuple(rank for rank in ranks if rank < STAND_IN),
            description="; ".join(
                [*texts[:MOST_LINES], *(["and more"] if texts[MOST_LINES:] else [])]
            ),
            evidence=evidence,
        )

    def _absence_text(self, alike: Sequence[Culprit]) -> str:
        first = alike[0]
        ranks = self._named([each.rank for each in alike])
        others = self._named(first.waiting)
        wait = "waits" if len(first.waiting) == 1 else "wait"
        of_group = self._operations.get((first.group, first.members), {})
        called = [each.get(first.sequence) for each in of_group.values()]
        what = next((f" ({each.named})" for each in called if each), "")
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


class _Names:
    """Which group a rank means by a name; of many records one has the ranks of a group."""

    def __init__(self, records: Sequence[FlightRecord]) -> None:
        self._members: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
        self._of_rank: dict[tuple[str, int], tuple[int, ...]] = {}
        for record in records:
            for name, ranks in record.members.items():
                known = self._members.setdefault(name, {})
                if ranks not in known:
                    known[ranks] = tuple(sorted(ranks))
                    for rank in ranks:
                        self._of_rank.setdefault((name, rank), known[ranks])

    def group(self, record: FlightRecord, name: str) -> _Group:
        """Return the group that the record of a rank calls so."""
        without_library = name.partition(" (")[0]
        known = self._members.get(without_library, {})
        if without_library in record.members:
            return name, known[record.members[without_library]]
        members = self._of_rank.get((without_library, record.rank))
        if members is None and len(known) == 1:
            (members,) = known.values()
        return name, members or ()


def _both(one: FlightRecord, other: FlightRecord) -> FlightRecord:
    """Return the record of a rank by two sources; each has groups of its own."""
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
            description=f"{ranks_text(ranks)} called {other.named} as collective {sequence} of"
            f" group {group}, while {ranks_text([r for r in called if r not in ranks])} called"
            f" {' '.join(usual).strip()}",
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


def _of_group(
    waits: _Waits,
    group: _Group,
    reached: Mapping[int, Reached],
    others: Iterable[int],
    recorded: set[int],
) -> None:
    """Find who is missing in a group's first work that no rank has left; `others` used none.

    Where the device of a rank did its part, or others would not be on, and the rank does not see
    it, it is behind.
    """
    name, members = group
    over = max(each.over for each in reached.values())
    left = tuple(sorted(rank for rank, each in reached.items() if each.over == over))
    for rank, each in reached.items():
        if each.inside and each.inside[0] < over:
            culprit = Culprit(
                rank=rank,
                why=Why.DEVICE_BEHIND,
                group=name,
                members=members,
                sequence=each.inside[0],
                waiting=left,
            )
            waits.behind.setdefault(rank, culprit)
    first = {
        rank: max(each.inside[0], over + 1)
        for rank, each in reached.items()
        if each.inside and each.inside[1] > over
    }
    if not first:
        return
    waits.inside |= first.keys()
    sequence = min(first.values())
    waiting = tuple(sorted(rank for rank, number in first.items() if number == sequence))
    for rank in sorted((*reached, *others)):
        here = reached.get(rank, Reached())
        if here.entered >= sequence:
            continue
        if here.inside and here.inside[0] == over:
            waits.inside.add(rank)  # held up in what others have left, as where a path loses data
            continue
        why = Why.NEVER_ENTERED if rank in recorded else Why.NOT_RECORDED
        waits.add(
            Culprit(
                rank=rank, why=why, group=name, members=members, sequence=sequence, waiting=waiting
            )
        )


def _evidence(called: Mapping[int, Operation], first: Sequence[int]) -> tuple[str, ...]:
    order = [*first, *(rank for rank in sorted(called) if rank not in first)]
    return tuple(
        f"flight recorder: rank {rank}: collective {called[rank].sequence},"
        f" {called[rank].named}, {called[rank].state or 'state unknown'}"
        for rank in order[:MOST_LINES]
    )
