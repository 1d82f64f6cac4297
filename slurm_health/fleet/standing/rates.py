# SPDX-License-Identifier: Apache-2.0
"""How often the nodes of a cluster are bad when a job starts, and how often they fail under one.

Of a job that spoils a node in several ways one counts: where the post-mortem of its script holds
the node at fault, that; what a check then finds there is the same fault.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_health.fleet.standing.observation import Signal
from slurm_health.fleet.standing.standing import NodeRecord, Standing
from slurm_health.records.standings import Counted, Rates, Reliability

_HOUR_S = 3600.0


def rates(records: Sequence[NodeRecord], standings: Sequence[Standing], *, days: float) -> Rates:
    """Return how often the nodes of one cluster were bad, in the days that the records are of.

    Lemons are apart: one of them is in a job at most once, however often it was bad before.
    """
    lemons = {each.node: each for each in standings if each.level is Reliability.LEMON}
    others = [each for each in records if each.node not in lemons]
    failed = {node.node: _accused(node) for node in others}
    at_start = [len(node.spoiled) - failed[node.node] for node in others]
    return Rates(
        days=days,
        nodes=len(records),
        starts=_counted(at_start, float(sum(node.jobs for node in others))),
        hours=_counted(list(failed.values()), sum(node.ran_s for node in others) / _HOUR_S),
        lemons=sum(each.spoiled / each.jobs for each in lemons.values()),
    )


def _accused(node: NodeRecord) -> int:
    return sum(Signal.ACCUSED.value in job.signals for job in node.spoiled)


def _counted(by_node: Sequence[int], exposure: float) -> Counted:
    """Return the events of all nodes; the mean over events of how many their node has is `clump`.

    A sum over nodes that are independent of each other, each with rare clumps of events, varies so
    many times as much as a count of single events.
    """
    events = sum(by_node)
    return Counted(
        events=events,
        exposure=exposure,
        nodes=sum(bool(each) for each in by_node),
        clump=sum(each * each for each in by_node) / events if events else 1.0,
    )
