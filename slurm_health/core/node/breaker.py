# SPDX-License-Identifier: Apache-2.0
"""How much may be drained: pure, over a ledger that all nodes share.

Many nodes failing together is a fabric, a filesystem, a driver update or a bug of a check. Taking
them all out would make it an outage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

from slurm_health.core.node.settings import Breaker
from slurm_health.core.nodeset import expand, fold

_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S
# Old entries go by their number: by age, one node whose clock is ahead would throw out all.
_MOST_ENTRIES = 1000


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One drain. Written before the drain, taken back when it fails. `uid` is -1 without a job."""

    node: str
    time_s: float
    partitions: tuple[str, ...] = ()
    job: int = 0
    uid: int = -1
    checks: tuple[str, ...] = ()
    text: str = ""
    hook: str = ""


class Trip(msgspec.Struct, frozen=True, kw_only=True):
    """The breaker of a partition tripped: none of `nodes` is drained until it is reset."""

    time_s: float
    node: str
    why: str
    nodes: str


class Ledger(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last drains, and the partitions whose breaker has tripped."""

    entries: tuple[Entry, ...] = ()
    trips: dict[str, Trip] = {}


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """The drain must not happen. `ledger` is what to keep: a trip may be new in it."""

    why: str
    ledger: Ledger


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """The drain may happen; `ledger` counts it already. It is the node's `today`th in a day."""

    ledger: Ledger
    today: int


def refusal(ledger: Ledger, wanted: Entry, limits: Breaker) -> str:
    """Say why the ledger alone rules a drain out; empty when Slurm has to be asked."""
    for partition, trip in ledger.trips.items():
        if partition in wanted.partitions or wanted.node in expand(trip.nodes):
            return (
                f"the breaker of {partition} has tripped: {trip.why};"
                " once the cause is found: slurm-health nodes reset"
            )
    return _too_many_for_owner(ledger.entries, wanted, limits)


def reserve(
    ledger: Ledger,
    wanted: Entry,
    *,
    limits: Breaker,
    members: Mapping[str, Collection[str]],
    ours: Collection[str],
) -> Allowed | Refused:
    """Decide about one drain and count it.

    Args:
        ledger: what has happened.
        wanted: the drain.
        limits: the site's.
        members: the nodes of each of the node's partitions.
        ours: nodes that are out of the pool now with a note of ours.
    """
    why = refusal(ledger, wanted, limits)
    if why:
        return Refused(why=why, ledger=ledger)
    # What was begun and cut short for the same job is the same drain.
    entries = [
        each
        for each in ledger.entries
        if not wanted.job or (each.node, each.job) != (wanted.node, wanted.job)
    ]
    counted = {each.node for each in entries if _age_s(each, wanted) <= limits.window_s} | {*ours}
    users = {each.node: each.uid for each in (*entries, wanted)}
    trips = dict(ledger.trips)
    for partition, nodes in sorted(members.items()):
        out = (counted | {wanted.node}) & set(nodes)
        if len(out) <= limits.allowed(len(nodes)):
            continue
        said = (
            f"with {wanted.node}, {fold(sorted(out))} would be drained, now or within"
            f" {limits.window_s / 60:g} min: {len(out)} of {len(nodes)} nodes of {partition},"
            f" limit {limits.allowed(len(nodes))}"
        )
        user, share = _first_user(users.get(node, -1) for node in out)
        if len(out) - share < 2:
            why = why or f"{said}; {share} of them after jobs of user {user}"
            continue
        said = f"{said}: a fabric or software problem, not these nodes"
        why = why or said
        trips[partition] = Trip(
            time_s=wanted.time_s, node=wanted.node, why=said, nodes=fold(sorted(nodes))
        )
    if why:
        return Refused(why=why, ledger=msgspec.structs.replace(ledger, trips=trips))
    after = (*entries, wanted)[-_MOST_ENTRIES:]
    today = sum(each.node == wanted.node and _age_s(each, wanted) <= _DAY_S for each in after)
    return Allowed(ledger=Ledger(entries=after, trips=trips), today=today)


def take_back(ledger: Ledger, node: str, time_s: float) -> Ledger:
    """Return the ledger without a drain that did not happen."""
    entries = tuple(each for each in ledger.entries if (each.node, each.time_s) != (node, time_s))
    return Ledger(entries=entries, trips=ledger.trips)


def _age_s(entry: Entry, wanted: Entry) -> float:
    """Return how old an entry is; one from the future, by a clock that is ahead, is new."""
    return max(0.0, wanted.time_s - entry.time_s)


def _first_user(uids: Iterable[int]) -> tuple[int, int]:
    """Return the user after whose jobs most nodes were drained, and how many."""
    counted = Counter(uid for uid in uids if uid >= 0)
    return max(counted.items(), key=lambda each: each[1], default=(-1, 0))


def _too_many_for_owner(entries: Collection[Entry], wanted: Entry, limits: Breaker) -> str:
    others = [each for each in entries if each.node != wanted.node]
    if wanted.job:
        nodes = {
            each.node
            for each in others
            if each.job == wanted.job and _age_s(each, wanted) <= max(limits.window_s, _HOUR_S)
        }
        if len(nodes) >= limits.per_job:
            return f"job {wanted.job} has cost {len(nodes)} nodes already, limit {limits.per_job}"
    if wanted.uid >= 0:
        nodes = {
            each.node
            for each in others
            if each.uid == wanted.uid and _age_s(each, wanted) <= _HOUR_S
        }
        if len(nodes) >= limits.per_user_hour:
            text = f"jobs of user {wanted.uid} have cost {len(nodes)} nodes within an hour"
            return f"{text}, limit {limits.per_user_hour}"
    return ""
