# SPDX-License-Identifier: Apache-2.0
"""How much may be drained: pure, over a ledger that all nodes share.

Many nodes failing together is a fabric, a filesystem, a driver update or a bug of a check. Taking
them all out would make it an outage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from slurm_health.node.rules.settings import Breaker
from slurm_health.records.nodeset import expand, fold
from slurm_health.records.text import counted

# Before the name of a leaf switch whose breaker trips. No partition has a blank in its name.
SWITCH = "switch "
_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S
# Old entries go by their number: by age, one node whose clock is ahead would throw out all.
_MOST_ENTRIES = 1000


class DrainEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One drain. Written before the drain, taken back when it fails. `uid` is -1 without a job.

    `note` is what was set on the node. One that a person has `returned` no longer counts against
    the share: a person has looked.
    """

    node: str
    time_s: float
    partitions: tuple[str, ...] = ()
    job: int = 0
    uid: int = -1
    checks: tuple[str, ...] = ()
    text: str = ""
    hook: str = ""
    note: str = ""
    returned: bool = False


class Trip(msgspec.Struct, frozen=True, kw_only=True):
    """The breaker of a partition, or of a leaf switch, tripped.

    None of `nodes` is drained until it is reset.
    """

    time_s: float
    node: str
    why: str
    nodes: str


class DrainLedger(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last drains, and the partitions whose breaker has tripped.

    `refused` are drains that the share ruled out and nothing tripped for: too many of one user's.
    They count only for whether the next one trips.
    """

    entries: tuple[DrainEntry, ...] = ()
    trips: dict[str, Trip] = {}
    refused: tuple[DrainEntry, ...] = ()


class DrainRefused(msgspec.Struct, frozen=True, kw_only=True):
    """The drain must not happen. `ledger` is what to keep: a trip may be new in it."""

    why: str
    ledger: DrainLedger


class DrainAllowed(msgspec.Struct, frozen=True, kw_only=True):
    """The drain may happen; `ledger` counts it already. It is the node's `today`th in a day."""

    ledger: DrainLedger
    today: int


def tripped_for(ledger: DrainLedger, node: str, partitions: Collection[str] = ()) -> str | None:
    """Return the partition, or the leaf switch, whose breaker keeps a node from being drained."""
    for partition, trip in ledger.trips.items():
        if partition in partitions or node in expand(trip.nodes):
            return partition
    return None


def refusal(
    ledger: DrainLedger, wanted: DrainEntry, limits: Breaker, *, name_of: Callable[[int], str] = str
) -> str:
    """Say why the ledger alone rules a drain out; empty when Slurm has to be asked.

    `name_of` tells how a user is called, and is asked only for what a refusal says.
    """
    partition = tripped_for(ledger, wanted.node, wanted.partitions)
    if partition is not None:
        return (
            f"the breaker of {partition} has tripped: {ledger.trips[partition].why};"
            " once the cause is found: slurm-health nodes reset"
        )
    return _too_many_for_owner(ledger.entries, wanted, limits, name_of)


def reserve(
    ledger: DrainLedger,
    wanted: DrainEntry,
    *,
    limits: Breaker,
    members: Mapping[str, Collection[str]],
    ours: Collection[str],
    racks: Mapping[str, Collection[str]] | None = None,
    name_of: Callable[[int], str] = str,
) -> DrainAllowed | DrainRefused:
    """Decide about one drain and count it.

    Args:
        ledger: what has happened.
        wanted: the drain.
        limits: the site's.
        members: the nodes of each of the node's partitions.
        ours: nodes that are out of the pool now with a note of ours.
        racks: the nodes below each leaf switch that the node hangs on; none where Slurm knows of
            none.
        name_of: how a user is called; asked only for what a refusal says.
    """
    why = refusal(ledger, wanted, limits, name_of=name_of)
    if why:
        return DrainRefused(why=why, ledger=ledger)
    # What was begun and cut short for the same job is the same drain.
    entries = [
        each
        for each in ledger.entries
        if not wanted.job or (each.node, each.job) != (wanted.node, wanted.job)
    ]
    counted = {*ours} | {
        each.node
        for each in entries
        if _age_s(each, wanted) <= limits.window_s and not each.returned
    }
    refused = [
        each
        for each in ledger.refused
        if each.node != wanted.node and _age_s(each, wanted) <= limits.window_s
    ]
    uids = {each.node: each.uid for each in (*refused, *entries, wanted)}
    shares = _shares(limits, members, racks or {})
    why, tripped = _over(shares, wanted, counted, refused, limits, uids, name_of)
    trips = {**ledger.trips, **tripped}
    if why:
        tried = (*refused, wanted)[-_MOST_ENTRIES:]
        after = msgspec.structs.replace(ledger, trips=trips, refused=tried)
        return DrainRefused(why=why, ledger=after)
    kept = (*entries, wanted)[-_MOST_ENTRIES:]
    today = sum(each.node == wanted.node and _age_s(each, wanted) <= _DAY_S for each in kept)
    return DrainAllowed(
        ledger=DrainLedger(entries=kept, trips=trips, refused=tuple(refused)), today=today
    )


class _Share(NamedTuple):
    """The nodes of a partition or below a leaf switch, and how many of them may be out at once."""

    name: str
    nodes: Collection[str]
    allowed: int


def _shares(
    limits: Breaker, members: Mapping[str, Collection[str]], racks: Mapping[str, Collection[str]]
) -> list[_Share]:
    of_partitions = [
        _Share(name, nodes, limits.allowed(len(nodes))) for name, nodes in sorted(members.items())
    ]
    of_racks = [
        _Share(f"{SWITCH}{name}", nodes, limits.allowed_in_rack(len(nodes)))
        for name, nodes in sorted(racks.items())
    ]
    return of_partitions + of_racks


def _over(
    shares: Sequence[_Share],
    wanted: DrainEntry,
    counted: Collection[str],
    refused: Sequence[DrainEntry],
    limits: Breaker,
    uids: Mapping[str, int],
    name_of: Callable[[int], str],
) -> tuple[str, dict[str, Trip]]:
    """Say what a drain would be beyond first, empty for nothing, and which breakers trip by it."""
    why = ""
    trips: dict[str, Trip] = {}
    for share in shares:
        out = {*counted, wanted.node} & {*share.nodes}
        if len(out) <= share.allowed:
            continue
        out |= {each.node for each in refused} & {*share.nodes}
        said, trips_it = _beyond(share, out, wanted, limits, uids, name_of)
        why = why or said
        if trips_it:
            nodes = fold(sorted(share.nodes))
            trips[share.name] = Trip(time_s=wanted.time_s, node=wanted.node, why=said, nodes=nodes)
    return why, trips


def _beyond(
    share: _Share,
    out: Collection[str],
    wanted: DrainEntry,
    limits: Breaker,
    uids: Mapping[str, int],
    name_of: Callable[[int], str],
) -> tuple[str, bool]:
    """Say what nodes that would be `out` are beyond, and whether the share's breaker trips by it.

    It does not for what the jobs of one user cost, but for one node at the most.
    """
    said = (
        f"with {wanted.node}, {fold(sorted(out))} would be drained, now or within"
        f" {limits.window_s / 60:g} min: {len(out)} of {len(share.nodes)} nodes of {share.name},"
        f" limit {share.allowed}"
    )
    uid, of_user = _first_user(uids.get(node, -1) for node in out)
    if len(out) - of_user < 2:
        return f"{said}; {of_user} of them after jobs of user {name_of(uid)}", False
    return f"{said}: a fabric or software problem, not these nodes", True


def take_back(ledger: DrainLedger, node: str, time_s: float) -> DrainLedger:
    """Return the ledger without a drain that did not happen."""
    entries = tuple(each for each in ledger.entries if (each.node, each.time_s) != (node, time_s))
    return msgspec.structs.replace(ledger, entries=entries)


def with_return(ledger: DrainLedger, node: str) -> DrainLedger:
    """Return the ledger after a person has returned a node to the pool."""
    entries = tuple(
        msgspec.structs.replace(each, returned=True) if each.node == node else each
        for each in ledger.entries
    )
    return msgspec.structs.replace(ledger, entries=entries)


def _age_s(entry: DrainEntry, wanted: DrainEntry) -> float:
    """Return how old an entry is; one from the future, by a clock that is ahead, is new.

    One of a later day is by a clock that is wrong, that of the entry or that of whoever asks. It
    would be new for ever, so it does not count; nodes that are drained now do, whenever that was.
    """
    age_s = wanted.time_s - entry.time_s
    return max(0.0, age_s) if age_s >= -_DAY_S else math.inf


def _first_user(uids: Iterable[int]) -> tuple[int, int]:
    """Return the user after whose jobs most nodes were drained, and how many."""
    counted = Counter(uid for uid in uids if uid >= 0)
    return max(counted.items(), key=lambda each: each[1], default=(-1, 0))


def _too_many_for_owner(
    entries: Collection[DrainEntry],
    wanted: DrainEntry,
    limits: Breaker,
    name_of: Callable[[int], str],
) -> str:
    others = [each for each in entries if each.node != wanted.node]
    if wanted.job:
        nodes = {
            each.node
            for each in others
            if each.job == wanted.job and _age_s(each, wanted) <= max(limits.window_s, _HOUR_S)
        }
        if len(nodes) >= limits.per_job:
            said = f"job {wanted.job} has cost {counted(len(nodes), 'node')} already"
            return f"{said}, limit {limits.per_job}"
    if wanted.uid >= 0:
        nodes = {
            each.node
            for each in others
            if each.uid == wanted.uid and _age_s(each, wanted) <= _HOUR_S
        }
        if len(nodes) >= limits.per_user_hour:
            user = name_of(wanted.uid)
            text = f"jobs of user {user} have cost {counted(len(nodes), 'node')} within an hour"
            return f"{text}, limit {limits.per_user_hour}"
    return ""
