# SPDX-License-Identifier: Apache-2.0
"""The evidence of a run: what was planned, what came back, and which of it can be believed.

A result that no planned round can have produced is refused. A result that was planned but
carries impossible numbers, or contradicts an earlier one, only loses its weight.

What can make a test bad is its nodes, and across leaf switches the two uplinks and the path: the
variables of the inference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

import msgspec
import numpy as np

from slurm_health.preflight.localize.belief_propagation import NONE, Floats, Ints
from slurm_health.records.errors import LocalizeError
from slurm_health.records.probe_catalog import Metric
from slurm_health.records.verdict import GroupResult, MetricName, Outcome, Round

_Times = TypeVar("_Times")
_Key = TypeVar("_Key", int, Metric)
_LEAST_MS, _MOST_MS = 1e-9, 1e12  # less than a clock cycle, more than a lifetime
_LEAF_IS_BAD, _PATH_IS_BAD = 0.003, 0.001
USUAL_RISK = 0.02  # what a node's prior is measured against


class Bearing(Enum):
    """What one group says about whether its members can work together."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"  # not run, a silent or crashed member, or results that contradict


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One group of one round, by node number, with only the numbers that can be believed."""

    round_index: int
    nodes: tuple[int, ...]
    outcome: Outcome
    bearing: Bearing
    shared_ms: Mapping[Metric, float]
    node_ms: Mapping[Metric, Mapping[int, float]]
    silent: tuple[int, ...]
    crashed: tuple[int, ...]
    said: Mapping[int, str]
    doubts: tuple[str, ...] = ()
    served: float = 1.0

    def partners(self, node: int) -> tuple[int, ...]:
        """Return the other members of the group."""
        return tuple(other for other in self.nodes if other != node)


class RoundLedger:
    """Every round that was planned and every result that was accepted, by node number."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.rounds: list[Round] = []
        self.met: list[set[int]] = [set() for _ in self.names]
        self.trials: dict[tuple[int, tuple[int, ...]], Trial] = {}
        self.observed: set[int] = set()
        self.took_s: dict[int, float] = {}  # rounds of which it is known
        self._raw: dict[tuple[int, tuple[int, ...]], GroupResult] = {}
        self._number = {name: number for number, name in enumerate(self.names)}

    def plan(
        self, groups: Iterable[Sequence[int]], index: int, *, shared_only: bool = False
    ) -> Round:
        """Add a round; its groups may be reported from now on."""
        members = [tuple(group) for group in groups]
        round_ = Round(
            index=index,
            groups=tuple(tuple(self.names[node] for node in group) for group in members),
            shared_only=shared_only,
        )
        for group in members:
            for node in group:
                self.met[node].update(other for other in group if other != node)
        self.rounds.append(round_)
        return round_

    def renumber_last(self, index: int) -> Round:
        """Give the last round another number, before it is begun."""
        self.rounds[-1] = msgspec.structs.replace(self.rounds[-1], index=index)
        return self.rounds[-1]

    def record(self, round_index: int, results: Iterable[GroupResult]) -> None:
        """Accept the results of a planned round; a repeated result changes nothing.

        Raises:
            LocalizeError: the round was never planned, or a result is not one of its groups.
        """
        rounds = {round_.index: round_ for round_ in self.rounds}
        if round_index not in rounds:
            raise LocalizeError(
                f"round {round_index} was never planned (planned so far: {len(self.rounds)})"
            )
        planned = {frozenset(group) for group in rounds[round_index].groups}
        checked = [(result, self._members(round_index, planned, result)) for result in results]
        for result, members in checked:
            self._accept((round_index, members), result)
            if result.round_s is not None:
                self.took_s[round_index] = result.round_s
        self.observed.add(round_index)

    def in_order(self) -> list[Trial]:
        """Return all trials, by round and then by members, however they arrived."""
        return [self.trials[key] for key in sorted(self.trials)]

    def _members(
        self, round_index: int, planned: set[frozenset[str]], result: GroupResult
    ) -> tuple[int, ...]:
        """Return the node numbers of a result after checking that it can be what it says."""
        nodes = frozenset(result.nodes)
        named = nodes.union(result.silent, result.crashed, result.said, *result.node_ms.values())
        if named == nodes and nodes in planned and len(nodes) == len(result.nodes):
            return tuple(sorted(self._number[name] for name in result.nodes))
        unknown = sorted(name for name in named if name not in self._number)
        if unknown:
            raise LocalizeError(f"round {round_index} reports unknown nodes: {', '.join(unknown)}")
        group = ", ".join(result.nodes)
        if nodes not in planned or len(nodes) != len(result.nodes):
            raise LocalizeError(f"round {round_index} never planned the group {group}")
        strangers = ", ".join(sorted(named - nodes))
        raise LocalizeError(
            f"round {round_index}, group {group}: reports about {strangers}, not a member"
        )

    def _accept(self, key: tuple[int, tuple[int, ...]], result: GroupResult) -> None:
        known = self._raw.get(key)
        if known is None:
            self._raw[key] = result
            self.trials[key] = self._trial(key, result)
        elif _content(known) != _content(result):
            self.trials[key] = Trial(
                round_index=key[0],
                nodes=key[1],
                outcome=Outcome.NOT_RUN,
                bearing=Bearing.UNKNOWN,
                shared_ms={},
                node_ms={},
                silent=(),
                crashed=(),
                said={},
                doubts=("two results that contradict each other",),
            )

    def _trial(self, key: tuple[int, tuple[int, ...]], result: GroupResult) -> Trial:
        doubts: list[str] = []
        started = result.outcome is not Outcome.NOT_RUN
        measured = result.outcome is Outcome.MEASURED
        silent = tuple(sorted(self._number[name] for name in result.silent))
        crashed = tuple(sorted(self._number[name] for name in result.crashed))
        node_ms = {
            metric: _usable(
                {self._number[n]: ms for n, ms in values.items()}, f"a {metric} time", doubts
            )
            for metric, values in sorted(_named(result.node_ms).items())
            if started
        }
        shared = _named(result.shared_ms) if measured else {}
        shared = _usable(shared, "a time of the group", doubts)
        bearing = Bearing.PASSED if measured else Bearing.FAILED
        if silent or crashed or not started:
            bearing, shared = Bearing.UNKNOWN, {}
        if bearing is Bearing.FAILED and len(key[1]) == 1:
            crashed, bearing = key[1], Bearing.UNKNOWN  # nobody else was involved
        return Trial(
            round_index=key[0],
            nodes=key[1],
            outcome=result.outcome,
            bearing=bearing,
            shared_ms=shared,
            node_ms=node_ms,
            silent=silent,
            crashed=crashed if started else (),
            said={self._number[name]: text for name, text in result.said.items()},
            doubts=tuple(doubts),
            served=result.served,
        )


def _named(times: Mapping[MetricName, _Times]) -> dict[Metric, _Times]:
    """Return times by metric; a plain name is that of a probe, or `probe:part`."""
    return {
        key if isinstance(key, Metric) else _metric_of(*key.partition(":")): value
        for key, value in times.items()
    }


def _metric_of(probe: str, _colon: str, part: str) -> Metric:
    return Metric(probe=probe, part=part)


def _usable(values: Mapping[_Key, float], what: str, doubts: list[str]) -> dict[_Key, float]:
    """Return the times that can be times of a test; note the others as doubts."""
    usable = {key: float(ms) for key, ms in values.items() if _LEAST_MS <= ms <= _MOST_MS}
    if len(usable) < len(values):
        doubts.append(f"{what} that cannot be a time was left out")
    return usable


def _content(result: GroupResult) -> tuple[object, ...]:
    """Return what a result says, without the order in which it says it; NaN equals NaN."""
    return (
        result.outcome,
        sorted((str(metric), repr(ms)) for metric, ms in result.shared_ms.items()),
        sorted(
            (str(metric), sorted((node, repr(ms)) for node, ms in values.items()))
            for metric, values in result.node_ms.items()
        ),
        sorted(result.silent),
        sorted(result.crashed),
        sorted(result.said.items()),
    )


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
