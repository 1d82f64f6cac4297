# SPDX-License-Identifier: Apache-2.0
"""What nodes told of themselves, in lines: what is the same on several nodes, once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from slurm_health.records.text import listed
from slurm_health.training.diagnosis.collected import Collected, NodesTold, NodeTold

_MOST_LINES = 24
_MOST_OF_NODE = 5
_REASONS = 3  # of what one kind of thing was not seen for


def lines_told(data: Collected, concerned: Collection[str]) -> Iterator[str]:
    """Yield what nodes told that may matter, at most so many lines; `concerned` nodes first.

    What every node tells of its state is how these nodes are, and says nothing of one of them.
    """
    told = data.get(NodesTold)
    if told is None:
        return
    if told.silent:
        yield f"{listed(told.silent)} did not answer: {told.why_silent or 'no answer in time'}"
    alike = _alike(told.nodes)
    by_line: dict[str, list[str]] = {}
    for node in sorted(told.nodes, key=lambda each: (each.node not in concerned, not each.kernel)):
        for line in list(_lines(node, alike))[:_MOST_OF_NODE]:
            by_line.setdefault(line, []).append(node.node)
    lines = [f"{listed(nodes)}: {line}" for line, nodes in by_line.items()]
    yield from lines[:_MOST_LINES]


def not_seen(data: Collected) -> dict[str, str]:
    """Return what was not collected, and why, with what nodes could not look at."""
    told = data.get(NodesTold)
    reasons: dict[str, dict[str, list[str]]] = {}
    for node in told.nodes if told else ():
        for what, why in node.not_seen.items():
            reasons.setdefault(what, {}).setdefault(why, []).append(node.node)
    of_nodes = {
        what: "; ".join(
            f"{why} ({listed(nodes)})" for why, nodes in list(by_why.items())[:_REASONS]
        )
        for what, by_why in reasons.items()
    }
    return {**data.missing, **of_nodes}


def _alike(nodes: Sequence[NodeTold]) -> frozenset[str]:
    if len(nodes) < 2:  # there is nothing to compare with
        return frozenset()
    return frozenset.intersection(*(frozenset(each.state) for each in nodes))


def _lines(told: NodeTold, alike: Collection[str]) -> Iterator[str]:
    yield from told.lost_gpus
    yield from (f"kernel: {line}" for line in reversed(told.kernel))
    if told.kills:
        yield f"{told.kills} killed for memory"
    yield from (line for line in told.state if line not in {*alike, *told.lost_gpus})
    yield from told.left
