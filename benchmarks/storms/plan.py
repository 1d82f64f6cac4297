# SPDX-License-Identifier: Apache-2.0
"""What happens in each storm; pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

# Nodes below one leaf switch, where a storm is of racks.
RACK = 10
# Where the backup slurmctld runs, in storms that lose the first one.
BACKUP = "n1"


class Deed(Enum):
    """What can happen, and to whom."""

    BREAK = "break"  # nodes: the check of prolog and health check finds a fault there
    MEND = "mend"
    STOP_SLURMCTLD = "stop slurmctld"  # it takes connections and answers none
    CONTINUE_SLURMCTLD = "continue slurmctld"
    KILL_SLURMCTLD = "kill slurmctld"
    START_SLURMCTLD = "start slurmctld"
    STALL_STORAGE = "stall storage"
    CONTINUE_STORAGE = "continue storage"
    FILL_STORAGE = "fill storage"
    EMPTY_STORAGE = "empty storage"
    RECONFIGURE = "reconfigure"
    REQUEUE = "requeue all jobs"
    POWER_DOWN = "power down"  # nodes; they come up again when a job wants them
    CLOCK_AHEAD = "clock ahead"  # nodes: what hooks take for the time is an hour ahead


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happens, so long after the storm's begin."""

    at_s: float
    deed: Deed
    nodes: tuple[str, ...] = ()


class Place(Enum):
    """What a storm needs beside nodes."""

    RACKS = "racks"  # a topology.conf
    BACKUP = "backup"  # a second slurmctld, on one of the nodes
    STORAGE = "storage"  # the shared directory on a network filesystem
    POWER = "power"  # power saving


@dataclass(frozen=True, kw_only=True)
class Storm:
    """One storm.

    Args:
        name: how it is called on the command line.
        about: what happens, in words.
        lasts_s: how long jobs are submitted.
        events: by the nodes and a source of chance.
        trips: whether the breaker must trip, must not, or may (None), as where slurmctld is
            silent: what is found then is not drained, and does not count.
        at_once: of the broken nodes, whether all are known when the storm ends.
        place: what it needs beside nodes.
        work_s: how long each job works.
        counted: whether slurmctld's statistics survive it.
    """

    name: str
    about: str
    lasts_s: float
    events: Callable[[Sequence[str], random.Random], list[Event]]
    trips: bool | None = None
    place: Place | None = None
    work_s: int = 2
    counted: bool = True


def events_of(
    storm: Storm, nodes: Sequence[str], *, seed: int, pace: float = 1.0
) -> tuple[Event, ...]:
    """Return what happens in a storm, in order; `pace` stretches its time."""
    found = storm.events(nodes, random.Random(f"{storm.name} {seed}"))
    stretched = (Event(at_s=e.at_s * pace, deed=e.deed, nodes=e.nodes) for e in found)
    return tuple(sorted(stretched, key=lambda each: each.at_s))


def rack_of(nodes: Sequence[str], number: int) -> tuple[str, ...]:
    """Return the nodes of a rack."""
    return tuple(nodes[number * RACK : (number + 1) * RACK])


def _some(nodes: Sequence[str], share: float, chance: random.Random) -> list[str]:
    """Return a share of the nodes, never the one of the backup, three at least."""
    others = [each for each in nodes if each != BACKUP]
    return chance.sample(others, min(len(others), max(3, round(share * len(nodes)))))


def _third(nodes: Sequence[str], chance: random.Random) -> list[Event]:
    return [
        Event(at_s=chance.uniform(0, 60), deed=Deed.BREAK, nodes=(node,))
        for node in _some(nodes, 0.3, chance)
    ]


def _rack(nodes: Sequence[str], chance: random.Random) -> list[Event]:
    lonely = chance.choice(nodes[RACK:])
    return [
        Event(at_s=5, deed=Deed.BREAK, nodes=rack_of(nodes, 0)),
        Event(at_s=35, deed=Deed.BREAK, nodes=(lonely,)),
    ]


def _flapping(nodes: Sequence[str], chance: random.Random) -> list[Event]:
    found = []
    for node in _some(nodes, 0.1, chance):
        at_s = chance.uniform(0, 10)
        while at_s < 80:
            broken_s = chance.uniform(4, 12)
            found += [
                Event(at_s=at_s, deed=Deed.BREAK, nodes=(node,)),
                Event(at_s=at_s + broken_s, deed=Deed.MEND, nodes=(node,)),
            ]
            at_s += broken_s + chance.uniform(4, 12)
    return found


def _failover(nodes: Sequence[str], chance: random.Random) -> list[Event]:
    more = [
        Event(at_s=20, deed=Deed.KILL_SLURMCTLD),
        Event(at_s=70, deed=Deed.START_SLURMCTLD),
    ]
    return _third(nodes, chance) + more


def _late(nodes: Sequence[str], chance: random.Random) -> list[Event]:
    more = []
    for at_s in (10, 35, 60):
        more += [
            Event(at_s=at_s, deed=Deed.STOP_SLURMCTLD),
            Event(at_s=at_s + 20, deed=Deed.CONTINUE_SLURMCTLD),
        ]
    return _third(nodes, chance) + more


def _storage(nodes: Sequence[str], chance: random.Random) -> list[Event]:
    early, later, last = _three(_some(nodes, 0.1, chance))
    return [
        Event(at_s=5, deed=Deed.STALL_STORAGE),
        Event(at_s=10, deed=Deed.BREAK, nodes=early),
        Event(at_s=125, deed=Deed.CONTINUE_STORAGE),
        Event(at_s=150, deed=Deed.FILL_STORAGE),
        Event(at_s=155, deed=Deed.BREAK, nodes=later),
        Event(at_s=190, deed=Deed.EMPTY_STORAGE),
        Event(at_s=200, deed=Deed.BREAK, nodes=last),
    ]


def _three(nodes: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(nodes[part::3]) for part in range(3)]


def _reconfigure(nodes: Sequence[str], chance: random.Random) -> list[Event]:
    return _third(nodes, chance) + [
        Event(at_s=2.0 * number, deed=Deed.RECONFIGURE) for number in range(30)
    ]


def _power(nodes: Sequence[str], chance: random.Random) -> list[Event]:
    asleep = tuple(_some(nodes, 0.4, chance))
    broken = asleep[: max(1, len(nodes) // 20)]
    return [
        Event(at_s=0, deed=Deed.POWER_DOWN, nodes=asleep),
        Event(at_s=1, deed=Deed.BREAK, nodes=broken),
    ]


def _requeued(nodes: Sequence[str], chance: random.Random) -> list[Event]:
    del nodes, chance
    return [Event(at_s=20, deed=Deed.REQUEUE), Event(at_s=40, deed=Deed.REQUEUE)]


def _clock(nodes: Sequence[str], chance: random.Random) -> list[Event]:
    ahead = tuple(_some(nodes, 0.2, chance))
    return [Event(at_s=10, deed=Deed.CLOCK_AHEAD, nodes=ahead), *_third(nodes, chance)]


STORMS = {
    storm.name: storm
    for storm in (
        Storm(
            name="well",
            about="nothing is wrong, and jobs run on all nodes",
            lasts_s=40,
            events=lambda _nodes, _chance: [],
            trips=False,
        ),
        Storm(
            name="third",
            about="three in ten nodes fail within a minute",
            lasts_s=75,
            events=_third,
            trips=True,
        ),
        Storm(
            name="rack",
            about="a rack of ten fails at once, and later one node elsewhere",
            lasts_s=60,
            events=_rack,
            trips=True,
            place=Place.RACKS,
        ),
        Storm(
            name="flapping",
            about="one in ten nodes fails and is well again, every few seconds",
            lasts_s=80,
            events=_flapping,
        ),
        Storm(
            name="failover",
            about="as third; slurmctld is killed, its backup takes over, and hands back",
            lasts_s=90,
            events=_failover,
            place=Place.BACKUP,
            counted=False,
        ),
        Storm(
            name="late",
            about="as third; slurmctld is silent three times, for 20 s each",
            # What is found while it is silent is not drained; what is broken must be, afterwards.
            lasts_s=170,
            events=_late,
            trips=True,
        ),
        Storm(
            name="storage",
            about="the shared directory stalls for two minutes, fills up, comes back",
            lasts_s=220,
            events=_storage,
            place=Place.STORAGE,
        ),
        Storm(
            name="reconfigure",
            about="as third, with `scontrol reconfigure` every 2 s",
            lasts_s=75,
            events=_reconfigure,
            trips=True,
        ),
        Storm(
            name="power",
            about="two in five nodes are powered down and come up, some of them broken",
            lasts_s=60,
            events=_power,
            place=Place.POWER,
        ),
        Storm(
            name="requeued",
            about="all jobs are requeued at once, twice",
            lasts_s=60,
            work_s=20,  # so that many run
            events=_requeued,
            trips=False,
        ),
        Storm(
            name="clock",
            about="as third; the clock of one in five nodes is an hour ahead",
            lasts_s=75,
            events=_clock,
            trips=True,
        ),
    )
}
