# SPDX-License-Identifier: Apache-2.0
"""How much may be drained at once: pure, over a ledger that all nodes share.

Many nodes failing together is a fabric, a filesystem, a driver update or a bug of a check. Taking
them all out would make it an outage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from slurm_health.core.node.settings import Breaker

_HOUR_S = 3600.0


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One drain by a hook. Written before the drain, taken back when it fails."""

    node: str
    time_s: float
    partitions: tuple[str, ...] = ()
    job: int = 0
    uid: int = -1
    checks: tuple[str, ...] = ()
    text: str = ""
    hook: str = ""


class Trip(msgspec.Struct, frozen=True, kw_only=True):
    """The breaker tripped: nobody is drained until an administrator resets it."""

    time_s: float
    node: str
    why: str


class Ledger(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Every drain that still counts, and whether the breaker has tripped."""

    entries: tuple[Entry, ...] = ()
    trip: Trip | None = None


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """The drain must not happen. `ledger` is what to keep: a trip may be new in it."""

    why: str
    ledger: Ledger


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """The drain may happen; `ledger` counts it already."""

    ledger: Ledger


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
    now_s = wanted.time_s
    longest_s = max(limits.window_s, _HOUR_S)
    recent = tuple(each for each in ledger.entries if now_s - each.time_s <= longest_s)
    kept = Ledger(entries=recent, trip=ledger.trip)
    if ledger.trip is not None:
        why = f"the breaker has tripped ({ledger.trip.why}); to reset it: slurm-health nodes reset"
        return Refused(why=why, ledger=kept)
    if why := _too_many_for_owner(recent, wanted, limits):
        return Refused(why=why, ledger=kept)
    if why := _too_many_of_partition(recent, wanted, limits, members, ours):
        trip = Trip(time_s=now_s, node=wanted.node, why=why)
        return Refused(why=why, ledger=Ledger(entries=recent, trip=trip))
    return Allowed(ledger=Ledger(entries=(*recent, wanted)))


def take_back(ledger: Ledger, node: str, time_s: float) -> Ledger:
    """Return the ledger without a drain that did not happen."""
    entries = tuple(each for each in ledger.entries if (each.node, each.time_s) != (node, time_s))
    return Ledger(entries=entries, trip=ledger.trip)


def _too_many_for_owner(recent: Collection[Entry], wanted: Entry, limits: Breaker) -> str:
    others = [each for each in recent if each.node != wanted.node]
    if wanted.job:
        nodes = {each.node for each in others if each.job == wanted.job}
        if len(nodes) >= limits.per_job:
            return f"job {wanted.job} has cost {len(nodes)} nodes already, limit {limits.per_job}"
    if wanted.uid >= 0:
        nodes = {
            each.node
            for each in others
            if each.uid == wanted.uid and wanted.time_s - each.time_s <= _HOUR_S
        }
        if len(nodes) >= limits.per_user_hour:
            text = f"jobs of user {wanted.uid} have cost {len(nodes)} nodes within an hour"
            return f"{text}, limit {limits.per_user_hour}"
    return ""


def _too_many_of_partition(
    recent: Collection[Entry],
    wanted: Entry,
    limits: Breaker,
    members: Mapping[str, Collection[str]],
    ours: Collection[str],
) -> str:
    within = {each.node for each in recent if wanted.time_s - each.time_s <= limits.window_s}
    counted = within | set(ours) | {wanted.node}
    for partition, nodes in sorted(members.items()):
        out = counted & set(nodes)
        allowed = max(1, int(limits.share * len(nodes)))
        if len(out) > allowed:
            return (
                f"{len(out)} of {len(nodes)} nodes of {partition} at once, limit {allowed}:"
                " a fabric or software problem, not these nodes"
            )
    return ""
