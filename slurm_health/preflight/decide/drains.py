# SPDX-License-Identifier: Apache-2.0
"""Which nodes a job's check wants out of the pool, and why: pure.

Whether they leave it is decided where every drain is: in `draining`, by the ledger of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_health.records.verdict import Level, NodeVerdict

# What slowness needs to count as proven: a fault shows itself, slowness is a matter of degree.
PROVEN_PROBABILITY = 0.99
PROVEN_EVIDENCE = 2


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Take a node out of the pool: for this component, and why in words."""

    node: str
    component: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeaveAlone:
    """Do not drain these nodes, and say why."""

    nodes: tuple[str, ...]
    reason: str


def drains(
    bad: Sequence[NodeVerdict],
    *,
    total: int,
    drain_slow: bool,
    max_bad_share: float,
) -> tuple[Drain | LeaveAlone, ...]:
    """Decide about the bad nodes of a run on `total` nodes; slow ones only with `drain_slow`."""
    actions: list[Drain | LeaveAlone] = []
    guilty = [node for node in bad if node.level is Level.FAULTY]
    for node in bad:
        if drain_slow and node.level is Level.SLOW:
            doubt = _doubt(node)
            if doubt:
                actions.append(LeaveAlone(nodes=(node.node,), reason=doubt))
            else:
                guilty.append(node)
    if len(guilty) > max(1, int(max_bad_share * total)):
        names = tuple(node.node for node in guilty)
        count = f"{len(guilty)} of {total} nodes bad at once"
        reason = f"{count}: probably a fabric or software problem"
        return (*actions, LeaveAlone(nodes=names, reason=reason))
    return (*actions, *map(_drain, guilty))


def _drain(node: NodeVerdict) -> Drain:
    # "compute device 3" is about compute: what a test on the node is chosen by.
    return Drain(
        node=node.node,
        component=node.component.partition(" ")[0],
        reason=f"{node.component}: {node.reason}",
    )


def _doubt(node: NodeVerdict) -> str:
    """Say why slowness is not proven well enough to drain for it, empty if it is."""
    if node.probability < PROVEN_PROBABILITY:
        return (
            f"slow with a probability of {node.probability:.3f},"
            f" a drain needs {PROVEN_PROBABILITY:g}"
        )
    if len(set(node.evidence)) < PROVEN_EVIDENCE:
        return "its slowness was seen in fewer than two measurements"
    return ""
