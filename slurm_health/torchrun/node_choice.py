# SPDX-License-Identifier: Apache-2.0
"""Which nodes training starts with, from a verdict. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from slurm_health.records.errors import UsageError
from slurm_health.records.nodeset import fold
from slurm_health.records.records import VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.torchrun.arguments import node_range

NOT_NEEDED = "not needed"
# Whom to take first. A slow node that is not excluded trains, but after the undoubted.
_PREFERENCE = (Level.HEALTHY, Level.SLOW, Level.INCONCLUSIVE)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How many nodes training may start with.

    `joins`: they are to join a training that has begun without them. `host` is the node without
    which it cannot go on, empty where there is none.
    """

    least: int
    most: int
    joins: bool = False
    host: str = ""

    @property
    def fixed(self) -> bool:
        """Whether there is only one number."""
        return self.least == self.most

    @property
    def text(self) -> str:
        """The same as --nnodes would say it."""
        return str(self.least) if self.fixed else f"{self.least}:{self.most}"


@dataclass(frozen=True, kw_only=True)
class NodeChoice:
    """The nodes training starts with, none where it does not, and why."""

    nodes: tuple[str, ...]
    reason: str


def bounds(
    nnodes: str | None, available: int, *, alone: bool = False, joins: bool = False
) -> Bounds:
    """Return how many nodes may train.

    Args:
        nnodes: the option.
        available: how many there are.
        alone: every node trains for itself.
        joins: too few for a training of their own may join another one.

    Raises:
        UsageError: --nnodes is neither N nor MIN:MAX, or more than there are.
    """
    if alone:
        return Bounds(least=1, most=available)
    least, most = node_range(nnodes) if nnodes else (available, available)
    if least <= available:
        return Bounds(least=least, most=most)
    if joins and least < most:
        return Bounds(least=1, most=available, joins=True)
    there = "is only 1 node" if available == 1 else f"are only {available} nodes"
    raise UsageError(
        f"--nnodes={nnodes}: there {there} here; to have them join a training"
        " that runs already, give a range (MIN:MAX), and its --rdzv-endpoint and --rdzv-id"
    )


def choose(
    bounds: Bounds,
    verdict: VerdictReached,
    *,
    absent: Collection[str],
    exclude_slow: bool,
) -> NodeChoice:
    """Choose the nodes to start with.

    A faulty node never trains. Doubt is no fault: an undecided node does, and so does one whose
    process is silent (`absent`) where training cannot start without it. It does not join others,
    who train well without it and would be interrupted.
    """
    unfit = {Level.FAULTY, Level.SLOW} if exclude_slow else {Level.FAULTY}
    if bounds.joins:
        unfit.add(Level.INCONCLUSIVE)
    bad = {node.node: node for node in verdict.nodes if node.level in unfit}
    fit = [node for node in verdict.nodes if node.node not in bad]
    present = [node for node in fit if node.node not in absent]
    present.sort(key=lambda node: _PREFERENCE.index(node.level))
    chosen = {node.node for node in present[: bounds.most]}
    missing = [node.node for node in fit if node.node in absent]
    chosen.update(missing[: max(0, bounds.least - len(chosen))])
    nodes = tuple(node.node for node in verdict.nodes if node.node in chosen)
    why = "; ".join(f"{name} is {node.level.value}: {node.reason}" for name, node in bad.items())
    if bounds.host and bounds.host not in chosen:
        host = next(node for node in verdict.nodes if node.node == bounds.host)
        reason = (
            f"{host.node} is {why_left_out(host)}; the nodes meet on it, so they cannot go on"
            f" without it: start the training again with --exclude={host.node}"
        )
        return NodeChoice(nodes=(), reason=reason)
    if len(nodes) < bounds.least and not bounds.joins:
        fewer = f", or allow fewer with --nnodes={len(fit)}:{bounds.most}" if fit else ""
        why += (
            f". --nnodes={bounds.text} cannot be met by the other {len(fit)}:"
            f" submit the job again with --exclude={fold(bad)}{fewer}"
        )
    if len(nodes) < bounds.least:
        return NodeChoice(nodes=(), reason=why)
    reasons = []
    for node in verdict.nodes:
        if node.node not in chosen:
            silent = node.reason or "its task is silent"
            needed = node.node in bad or node.node in absent
            reasons.append(f"without {node.node}: {silent if needed else NOT_NEEDED}")
    reasons += [
        f"with {node.node} anyway: {node.level.value}, {node.reason}"
        for node in verdict.nodes
        if node.node in chosen and node.level is not Level.HEALTHY
    ]
    return NodeChoice(nodes=nodes, reason="; ".join(reasons))


def why_left_out(node: NodeVerdict) -> str:
    """Return why a node does not train although others do."""
    healthy = node.level is Level.HEALTHY
    return NOT_NEEDED if healthy else f"{node.level.value}, {node.reason}"


def others_text(count: int) -> str:
    """Return how many nodes train without one that is left out."""
    return "the other node" if count == 1 else f"the other {count} nodes"
