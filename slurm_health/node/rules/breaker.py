# SPDX-License-Identifier: Apache-2.0
"""How many nodes may be drained at once, by a ledger that all nodes share. Pure.

Many nodes failing together is a fabric, a filesystem, a driver update or a bug of a check. Taking
them all out would make it an outage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import msgspec

from slurm_health.node.rules.repair import RepairAttempt
from slurm_health.node.rules.settings import WINDOW_S, Breaker
from slurm_health.records.nodeset import expand, fold
from slurm_health.records.text import counted

# Before the name of a leaf switch whose breaker trips. No partition has a blank in its name.
SWITCH = "switch "
# One job's drains. A job that breaks nodes must not get through the cluster by retrying.
PER_JOB = 2
# Drains in one hour after jobs of one user.
PER_USER_HOUR = 4
_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S
# Old entries expire by their number: by age, one clock that is ahead would expire all.
_MOST_ENTRIES = 1000


class DrainEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One drain, written before it is done and taken back if it fails.

    Args:
        node: the node.
        time_s: when.
        partitions: of the node.
        job: after which job; 0 for none.
        uid: the job's user; -1 without a job.
        checks: that failed.
        text: what is wrong.
        hook: that drains.
        note: as it is set on the node.
        returned: an administrator returned the node since: it no longer counts against the share.
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

    None of `nodes` is drained for one of `checks` until it is reset; without `checks`, for nothing.
    """

    time_s: float
    node: str
    why: str
    nodes: str
    checks: tuple[str, ...] = ()


class Ignored(msgspec.Struct, frozen=True, kw_only=True):
    """A node that an administrator leaves in service until then, whatever its checks say."""

    until_s: float
    by: str
    why: str = ""


class DrainLedger(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ledger of drains and repairs of all nodes.

    Args:
        entries: the last drains.
        trips: the breakers that have tripped, by partition or leaf switch.
        refused: drains beyond the share for which nothing tripped: too many of one user's. They
            count only for whether the next one trips.
        repairs: the attempts to repair nodes.
        ignored: nodes that are not drained for a while.
        reported: the last problem of the config file, and when it was sent.
    """

    entries: tuple[DrainEntry, ...] = ()
    trips: dict[str, Trip] = {}
    refused: tuple[DrainEntry, ...] = ()
    repairs: tuple[RepairAttempt, ...] = ()
    ignored: dict[str, Ignored] = {}
    reported: tuple[str, float] = ("", 0.0)


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a drain may happen.

    Args:
        ledger: what to save: it counts the drain, or has a new trip.
        why_not: the drain must not happen; empty if it may.
        today: which drain of the node within a day it is.
        tripped: a breaker tripped that had not before.
    """

    ledger: DrainLedger
    why_not: str = ""
    today: int = 0
    tripped: bool = False


def tripped_for(
    ledger: DrainLedger,
    node: str,
    partitions: Collection[str] = (),
    checks: Collection[str] | None = None,
) -> str | None:
    """Return the name of the breaker that keeps a node from being drained, None for none.

    With `checks`, for a fault that these have measured; without, for any.
    """
    for name, trip in ledger.trips.items():
        concerned = checks is None or not trip.checks or not set(trip.checks).isdisjoint(checks)
        if concerned and (name in partitions or node in expand(trip.nodes)):
            return name
    return None


def refusal(ledger: DrainLedger, wanted: DrainEntry, *, name_of: Callable[[int], str] = str) -> str:
    """Return why the ledger alone rules a drain out; empty if Slurm has to be asked.

    `name_of` returns a user's name, and is called only for the text of a refusal.
    """
    ignored = ledger.ignored.get(wanted.node)
    if ignored is not None and wanted.time_s < ignored.until_s:
        hours = (ignored.until_s - wanted.time_s) / _HOUR_S
        why = f": {ignored.why}" if ignored.why else ""
        return f"{ignored.by} has it ignored for another {hours:.0f} h{why}"
    partition = tripped_for(ledger, wanted.node, wanted.partitions, wanted.checks)
    if partition is not None:
        return (
            f"the breaker of {partition} has tripped: {ledger.trips[partition].why};"
            " once the cause is found: slurm-health nodes reset"
        )
    others = [entry for entry in ledger.entries if entry.node != wanted.node]
    of_job = {e.node for e in others if e.job == wanted.job and _age_s(e, wanted) <= WINDOW_S}
    if wanted.job and len(of_job) >= PER_JOB:
        nodes = counted(len(of_job), "node")
        return f"job {wanted.job} has cost {nodes} already, limit {PER_JOB}"
    of_user = {e.node for e in others if e.uid == wanted.uid and _age_s(e, wanted) <= _HOUR_S}
    if wanted.uid >= 0 and len(of_user) >= PER_USER_HOUR:
        user, nodes = name_of(wanted.uid), counted(len(of_user), "node")
        return f"jobs of user {user} have cost {nodes} within an hour, limit {PER_USER_HOUR}"
    return ""


def reserve(
    ledger: DrainLedger,
    wanted: DrainEntry,
    *,
    limits: Breaker,
    members: Mapping[str, Collection[str]],
    ours: Mapping[str, Collection[str]],
    racks: Mapping[str, Collection[str]] | None = None,
    name_of: Callable[[int], str] = str,
) -> Reservation:
    """Decide about one drain and count it.

    Args:
        ledger: the drains so far.
        wanted: the drain.
        limits: the site's.
        members: the nodes of every partition that the node is in.
        ours: nodes that are out of the pool now with a note of ours, and the checks it names.
        racks: the nodes below every leaf switch that the node hangs on; none if Slurm has no
            topology.
        name_of: returns a user's name, and is called only for the text of a refusal.
    """
    why = refusal(ledger, wanted, name_of=name_of)
    if why:
        return Reservation(ledger=ledger, why_not=why)
    # What was begun and cut short for the same job is the same drain.
    entries = [
        entry
        for entry in ledger.entries
        if not wanted.job or (entry.node, entry.job) != (wanted.node, wanted.job)
    ]
    recent = [
        entry for entry in entries if _age_s(entry, wanted) <= WINDOW_S and not entry.returned
    ]
    refused = [
        entry
        for entry in ledger.refused
        if entry.node != wanted.node and _age_s(entry, wanted) <= WINDOW_S
    ]
    faults: dict[str, set[str]] = {node: set(checks) for node, checks in ours.items()}
    for entry in (*recent, wanted):
        faults.setdefault(entry.node, set()).update(entry.checks)
    alike = {
        node
        for node, checks in faults.items()
        if node == wanted.node or not checks or not checks.isdisjoint(wanted.checks)
    }
    uids = {entry.node: entry.uid for entry in (*refused, *entries, wanted)}
    too_many = [
        *_beyond(members, {*faults}, alike, limits, in_rack=False),
        *_beyond(racks or {}, {*faults}, alike, limits, in_rack=True),
    ]
    trips = dict(ledger.trips)
    for excess in too_many:
        out = excess.out | {entry.node for entry in refused} & {*excess.nodes}
        text = (
            f"with {wanted.node}, {fold(sorted(out))} would be drained, now or within"
            f" {WINDOW_S / 60:g} min: {len(out)} of {len(excess.nodes)} nodes of"
            f" {excess.name}, limit {excess.allowed}"
        )
        users = Counter(uid for node in out if (uid := uids.get(node, -1)) >= 0)
        uid, of_user = max(users.items(), key=lambda item: item[1], default=(-1, 0))
        # What the jobs of one user cost, but for one node at the most, trips nothing.
        if len(out) - of_user < 2:
            why = why or f"{text}; {of_user} of them after jobs of user {name_of(uid)}"
            continue
        kinds = len({frozenset(faults.get(node, ())) for node in out})
        cause = (
            f"{text}: a fabric or software problem, not these nodes"
            if excess.of_kind
            else f"{text}: {counted(len(out), 'node')}, {counted(kinds, 'different fault')}"
        )
        why = why or cause
        trips[excess.name] = Trip(
            time_s=wanted.time_s,
            node=wanted.node,
            why=cause,
            nodes=fold(sorted(excess.nodes)),
            checks=wanted.checks if excess.of_kind else (),
        )
    if why:
        tried = (*refused, wanted)[-_MOST_ENTRIES:]
        after = msgspec.structs.replace(ledger, trips=trips, refused=tried)
        tripped = trips.keys() != ledger.trips.keys()
        return Reservation(ledger=after, why_not=why, tripped=tripped)
    kept = (*entries, wanted)[-_MOST_ENTRIES:]
    today = sum(entry.node == wanted.node and _age_s(entry, wanted) <= _DAY_S for entry in kept)
    after = msgspec.structs.replace(ledger, entries=kept, trips=trips, refused=tuple(refused))
    return Reservation(ledger=after, today=today)


class _Excess(NamedTuple):
    """A partition, or the nodes below a leaf switch, of which too many would be out.

    `of_kind`: with one kind of fault.
    """

    name: str
    nodes: Collection[str]
    out: set[str]
    allowed: int
    of_kind: bool


def _beyond(
    groups: Mapping[str, Collection[str]],
    out: set[str],
    alike: set[str],
    limits: Breaker,
    *,
    in_rack: bool,
) -> Iterator[_Excess]:
    """Yield the groups of which too many nodes would be out: of a kind first, then of any."""
    for name, nodes in sorted(groups.items()):
        full_name = f"{SWITCH}{name}" if in_rack else name
        for of_kind, some in ((True, alike), (False, out)):
            allowed = limits.allowed(len(nodes), in_rack=in_rack, alike=of_kind)
            if len(some & {*nodes}) > allowed:
                yield _Excess(full_name, nodes, some & {*nodes}, allowed, of_kind)
                break


def take_back(ledger: DrainLedger, node: str, time_s: float) -> DrainLedger:
    """Return the ledger without a drain that did not happen."""
    entries = tuple(e for e in ledger.entries if (e.node, e.time_s) != (node, time_s))
    return msgspec.structs.replace(ledger, entries=entries)


def with_return(ledger: DrainLedger, node: str) -> DrainLedger:
    """Return the ledger after an administrator has returned a node to the pool."""
    entries = tuple(
        msgspec.structs.replace(entry, returned=True) if entry.node == node else entry
        for entry in ledger.entries
    )
    return msgspec.structs.replace(ledger, entries=entries)


def _age_s(entry: DrainEntry, wanted: DrainEntry) -> float:
    """Return how old an entry is; one from the future, by a clock that is ahead, is new.

    An entry of a later day has the time of a wrong clock, its own or this node's. It would be new
    for ever, so it does not count; nodes that are drained now do, whatever their time.
    """
    age_s = wanted.time_s - entry.time_s
    return max(0.0, age_s) if age_s >= -_DAY_S else math.inf
