# SPDX-License-Identifier: Apache-2.0
"""Which nodes are taken out of the pool, and with what note: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_health.core.text import REASON_LENGTH, REASON_PREFIX, plain
from slurm_health.core.verdict import Level, NodeVerdict

# What slowness needs to count as proven: a fault shows itself, slowness is a matter of degree.
PROVEN_PROBABILITY = 0.99
PROVEN_EVIDENCE = 2


@dataclass(frozen=True, kw_only=True)
class Drain:
    """Take nodes out of the pool, with one note for all of them."""

    nodes: tuple[str, ...]
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
    job_id: int,
    drain_slow: bool,
    max_bad_share: float,
    node_reasons: Mapping[str, str],
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
    fresh: dict[str, list[str]] = {}
    for node in guilty:
        note = node_reasons.get(node.node)
        if note is None:
            fresh.setdefault(drain_reason(node, job_id), []).append(node.node)
        else:
            reason = f"already out of the pool: {note or '(no reason given)'}"
            actions.append(LeaveAlone(nodes=(node.node,), reason=reason))
    # One call for all nodes with the same note: each call locks the controller.
    actions += [Drain(nodes=tuple(nodes), reason=note) for note, nodes in fresh.items()]
    return tuple(actions)


def drain_reason(node: NodeVerdict, job_id: int) -> str:
    """Return the note for Slurm: ASCII, one line, short, beginning with our prefix."""
    text = f"{REASON_PREFIX} job {job_id}: {node.component}: {node.reason}"
    return plain(text)[:REASON_LENGTH]


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
