# SPDX-License-Identifier: Apache-2.0
"""A recording of faults, and clusters of any size drawn from it. Pure.

What is replayed of a node is how long it is well after each repair, and how long each repair takes:
who repairs a node sooner or later shifts what follows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

DAY_S = 86400.0
# A fault so soon after a repair is a relapse. The window of Kokolis et al. (arXiv:2410.21680) for
# nodes that fail again and again.
RELAPSE_D = 28.0


class _FaultType(msgspec.Struct):
    level: str = msgspec.field(name="Level")
    kind: str = msgspec.field(name="Class")
    said: str = msgspec.field(name="Desc")


class _Event(msgspec.Struct):
    node_id: str
    event_time: float
    event_type: str
    fault_type: _FaultType


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a node, in days since the recording began."""

    start_d: float
    end_d: float
    what: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Stay:
    """How long a node is well, what it then fails with, and how long its repair takes.

    `again` tells that it failed with the same before, at most `RELAPSE_D` ago.
    """

    well_s: float
    repair_s: float
    what: tuple[str, str]
    relapse: bool = False
    again: bool = False


History = tuple[Stay, ...]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The faults of each of `nodes` nodes; those without any are not in `faults`."""

    nodes: int
    days: float
    faults: Mapping[str, tuple[Fault, ...]]


def read(data: bytes, *, nodes: int = 400) -> Recording:
    """Return what a `fault_trace.json` of InfiniteHBD-Trace says.

    Raises:
        ValueError: it is no such file.
    """
    try:
        events = msgspec.json.decode(data, type=list[_Event])
    except msgspec.MsgspecError as err:
        raise ValueError(f"it is no fault trace: {err}") from err
    begun: dict[tuple[str, str, str], float] = {}
    found: dict[str, list[Fault]] = {}
    for event in events:
        what = (event.fault_type.kind, event.fault_type.said)
        if event.event_type == "fault_start":
            begun.setdefault((event.node_id, *what), event.event_time)
        elif (start_d := begun.pop((event.node_id, *what), None)) is not None:
            fault = Fault(start_d=start_d, end_d=event.event_time, what=what)
            found.setdefault(event.node_id, []).append(fault)
    if len(found) > nodes:
        raise ValueError(f"it has {len(found)} nodes, more than the {nodes} that it is of")
    days = max((event.event_time for event in events), default=0.0)
    faults = {name: _apart(each) for name, each in sorted(found.items())}
    return Recording(nodes=nodes, days=days, faults=faults)


def _apart(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """Return the faults in order, without those that begin while an earlier one is repaired."""
    kept: list[Fault] = []
    for fault in sorted(faults, key=lambda each: (each.start_d, each.end_d)):
        if not kept or fault.start_d >= kept[-1].end_d:
            kept.append(fault)
    return tuple(kept)


def as_recorded(recording: Recording) -> list[History]:
    """Return the history of each node as it was."""
    known = [_stays(faults, 0.0) for faults in recording.faults.values()]
    return known + [()] * (recording.nodes - len(known))


def resampled(recording: Recording, nodes: int, rng: random.Random) -> list[History]:
    """Return histories of so many nodes: each a node of the recording, from a day of its own on.

    The year of each goes round: what follows its end is its beginning. So rates and relapses stay,
    and what failed in common, as a rack, does not.
    """
    every = [*recording.faults.values(), *[()] * (recording.nodes - len(recording.faults))]
    return [
        _turned(rng.choice(every), rng.uniform(0, recording.days), recording) for _ in range(nodes)
    ]


def _turned(faults: tuple[Fault, ...], from_d: float, recording: Recording) -> History:
    later = [fault for fault in faults if fault.start_d >= from_d]
    before = [
        Fault(
            start_d=fault.start_d + recording.days,
            end_d=fault.end_d + recording.days,
            what=fault.what,
        )
        for fault in faults
        if fault.start_d < from_d
    ]
    return _stays((*later, *before), from_d)


def _stays(faults: Sequence[Fault], from_d: float) -> History:
    found: list[Stay] = []
    well_from_d, last = from_d, ("", "")
    for fault in faults:
        well_d = max(0.0, fault.start_d - well_from_d)
        relapse = bool(found) and well_d <= RELAPSE_D
        found.append(
            Stay(
                well_s=well_d * DAY_S,
                repair_s=max(0.0, fault.end_d - fault.start_d) * DAY_S,
                what=fault.what,
                relapse=relapse,
                again=relapse and fault.what == last,
            )
        )
        well_from_d, last = fault.end_d, fault.what
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What the recording has; of `repairs`, `relapses` are followed by a fault within 28 days."""

    faults: int
    per_node_day: float
    repairs: int
    relapses: int
    again: int
    median_gap_h: float


def counted(recording: Recording) -> Counted:
    """Return how often nodes fail, and fail again."""
    stays = [stay for history in as_recorded(recording) for stay in history]
    gaps_s = sorted(stay.well_s for stay in stays if stay.relapse)
    seen_out = [
        fault
        for faults in recording.faults.values()
        for fault in faults
        if fault.end_d <= recording.days - RELAPSE_D
    ]
    relapsed = sum(
        later.start_d - first.end_d <= RELAPSE_D and first.end_d <= recording.days - RELAPSE_D
        for faults in recording.faults.values()
        for first, later in pairwise(faults)
    )
    return Counted(
        faults=len(stays),
        per_node_day=len(stays) / (recording.nodes * recording.days) if stays else 0.0,
        repairs=len(seen_out),
        relapses=relapsed,
        again=sum(stay.again for stay in stays),
        median_gap_h=gaps_s[len(gaps_s) // 2] / 3600 if gaps_s else 0.0,
    )
