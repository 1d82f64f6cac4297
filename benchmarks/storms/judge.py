# SPDX-License-Identifier: Apache-2.0
"""What must hold after a storm; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.storms.look import Seen
from benchmarks.storms.plan import RACK, Deed, Event, Place, Storm
from slurm_health.node.rules import drain_note
from slurm_health.node.rules.settings import Breaker

# A drain is two questions for nodes before and one after it, each with its partitions, one for the
# topology, and the drain. A hook that is refused has asked for less.
MESSAGES_PER_DRAIN = 8
# A health check of a node that we drained asks whether the drain is still ours (2); one that
# returns it asks twice more and lifts it (5 with the answer's look).
MESSAGES_PER_CHECK = 7
TRIP_LIMIT_S = 5.0
# What the prolog's shim allows.
PROLOG_LIMIT_S = 125.0


def violations(
    storm: Storm, nodes: Sequence[str], events: Sequence[Event], seen: Seen
) -> list[str]:
    """Return what is wrong, in words; only what does not depend on the machine's speed."""
    broken = {node for event in events if event.deed is Deed.BREAK for node in event.nodes}
    return [
        *_nodes(storm, nodes, broken, seen),
        *_messages(storm, broken, events, seen),
        *_hooks(seen),
        *_jobs(seen),
        *(f"{node} is not back: {how}" for node, how in sorted(seen.still_out.items())),
    ]


def lateness(seen: Seen) -> list[str]:
    """Return what took longer than it should: on a machine that has the time for so many nodes."""
    return [
        f"the breaker of {name} took {took_s:.1f} s, limit {TRIP_LIMIT_S:g} s"
        for name, took_s in seen.trip_took_s.items()
        if took_s > TRIP_LIMIT_S
    ]


def allowed(storm: Storm, nodes: Sequence[str]) -> int:
    """Return how many nodes the breaker lets be drained, with its defaults."""
    share = Breaker().allowed(len(nodes))
    if storm.place is Place.RACKS:
        return min(share, Breaker().allowed_in_rack(RACK) + 1)
    return share


def _nodes(storm: Storm, nodes: Sequence[str], broken: set[str], seen: Seen) -> Iterator[str]:
    for node, reason in sorted(seen.drained.items()):
        if not drain_note.is_ours(reason):
            yield f"{node} was drained by Slurm: {reason}"
        elif node not in broken:
            yield f"{node} was drained and is well: {reason}"
    most = allowed(storm, nodes)
    ours = [node for node, reason in seen.drained.items() if drain_note.is_ours(reason)]
    if len(ours) > most:
        yield f"{len(ours)} nodes are drained, limit {most}: {' '.join(sorted(ours))}"
    if storm.trips is False and seen.tripped:
        yield "the breaker has tripped"
    if storm.trips and not seen.tripped and not _of_one_user(seen.found_by, most):
        yield "the breaker has not tripped"


def _of_one_user(found_by: Mapping[str, int], most: int) -> bool:
    """Tell whether more nodes were found than may be drained, but all but one by one user's jobs.

    No user may trip the breaker.
    """
    counted = Counter(uid for uid in found_by.values() if uid >= 0)
    return len(found_by) > most and len(found_by) - max(counted.values(), default=0) < 2


def _messages(storm: Storm, broken: set[str], events: Sequence[Event], seen: Seen) -> Iterator[str]:
    if not storm.counted:
        return
    breaks = sum(len(event.nodes) for event in events if event.deed is Deed.BREAK)
    failed = sum(ran.hook == "prolog" and ran.code != 0 for ran in seen.ran)
    checks = sum(ran.hook == "healthcheck" and ran.node in broken for ran in seen.ran)
    most = MESSAGES_PER_DRAIN * (breaks + failed) + MESSAGES_PER_CHECK * checks
    sent = sum(seen.messages.values())
    if sent > most:
        yield f"{sent} messages to slurmctld, of {most} at most: {seen.messages}"


def _hooks(seen: Seen) -> Iterator[str]:
    for ran in seen.ran:
        if ran.hook == "prolog" and ran.code not in {0, 1}:
            yield f"a prolog of {ran.node} ended with {ran.code}"
        if ran.hook == "prolog" and ran.wall_s > PROLOG_LIMIT_S:
            yield f"a prolog of {ran.node} took {ran.wall_s:.0f} s"


def _jobs(seen: Seen) -> Iterator[str]:
    for job in sorted(seen.submitted):
        state, reason = seen.ended.get(job, ("UNKNOWN", ""))
        if state != "COMPLETED":
            yield f"job {job} is {state} ({reason})"
