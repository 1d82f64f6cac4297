# SPDX-License-Identifier: Apache-2.0
"""What can make a test bad: its nodes, and across leaf switches the two uplinks and the path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurm_health.preflight.localize.belief_propagation import NONE, Floats, Ints
from slurm_health.preflight.localize.evidence import Trial
from slurm_health.records.errors import LocalizeError

_LEAF_IS_BAD, _PATH_IS_BAD = 0.003, 0.001
USUAL_RISK = 0.02  # what a node's prior is measured against


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The leaf switch of each node (-1: not known), and the names of the leaves.

    `found` are leaves that no topology names: sets of nodes that were found by their tests.
    """

    leaves: tuple[str, ...]
    leaf: tuple[int, ...]
    found: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(names: Sequence[str], topology: Mapping[str, Sequence[str]] | None) -> Fabric:
        """Return the fabric of these nodes; switches without any of them are left out.

        Raises:
            LocalizeError: a node hangs on two leaf switches.
        """
        number = {name: index for index, name in enumerate(names)}
        leaf = [NONE] * len(names)
        leaves: list[str] = []
        for switch, members in (topology or {}).items():
            here = [number[name] for name in dict.fromkeys(members) if name in number]
            for node in here:
                if leaf[node] != NONE:
                    raise LocalizeError(
                        f"node {names[node]} hangs on two leaf switches,"
                        f" {leaves[leaf[node]]} and {switch}"
                    )
                leaf[node] = len(leaves)
            if here:
                leaves.append(switch)
        return Fabric(leaves=tuple(leaves), leaf=tuple(leaf))

    @property
    def known(self) -> bool:
        """Tell whether the topology says which nodes are on different leaves."""
        return len(self.leaves) > 1

    def with_found(self, sets: Sequence[tuple[int, ...]]) -> Fabric:
        """Return this fabric with these sets of nodes as leaves without a name."""
        return replace(self, found=tuple(sets))

    def crosses(self, nodes: Sequence[int]) -> bool:
        """Tell whether a group of two is known to span two leaves."""
        ends = {self.leaf[node] for node in nodes}
        return len(ends) == 2 and NONE not in ends


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The variables of the inference: nodes, then leaves, then the paths that were tested.

    Leaves that were found come after those of the topology.
    """

    table: Ints  # a row per trial, padded with NONE
    paths: tuple[tuple[int, int], ...]
    nodes: int
    leaves: int

    @property
    def variables(self) -> int:
        """Return how many there are."""
        return self.nodes + self.leaves + len(self.paths)


def sources_of(trials: Sequence[Trial], fabric: Fabric) -> Sources:
    """Return which variables each trial involves."""
    nodes, leaves = len(fabric.leaf), len(fabric.leaves) + len(fabric.found)
    paths: dict[tuple[int, int], int] = {}
    width = 5 if fabric.known else 4 if fabric.found else 2
    home = {
        node: nodes + len(fabric.leaves) + number
        for number, members in enumerate(fabric.found)
        for node in members
    }
    table = np.full((len(trials), width), NONE, dtype=np.int64)
    for row, trial in enumerate(trials):
        table[row, : len(trial.nodes)] = trial.nodes
        uplinks = {home.get(node, NONE) for node in trial.nodes}
        if len(uplinks) > 1:
            table[row, 2:] = [home.get(node, NONE) for node in trial.nodes]
        if fabric.known and fabric.crosses(trial.nodes):
            low, high = sorted(fabric.leaf[node] for node in trial.nodes)
            path = paths.setdefault((low, high), len(paths))
            table[row, 2:] = (nodes + low, nodes + high, nodes + leaves + path)
    return Sources(table=table, paths=tuple(paths), nodes=nodes, leaves=leaves)


def odds_of(sources: Sources, prior: Mapping[int, float]) -> Floats:
    """Return log prior odds: of nodes relative to the usual, of leaves and paths absolute.

    A prior orders and shifts; it is bounded so that it can never convict or acquit.
    """
    odds = np.zeros(sources.variables)
    odds[sources.nodes :] = _logit(_LEAF_IS_BAD)
    odds[sources.nodes + sources.leaves :] = _logit(_PATH_IS_BAD)
    for node, probability in prior.items():
        bounded = min(max(probability, 0.001), 0.3)
        odds[node] = _logit(bounded) - _logit(USUAL_RISK)
    return odds


def _logit(probability: float) -> float:
    return float(np.log(probability / (1 - probability)))
