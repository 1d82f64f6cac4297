# SPDX-License-Identifier: Apache-2.0
"""The evidence of a run: the planned rounds, their results, and which numbers are credible.

A result that no planned round can have produced is refused. A planned result with impossible
numbers, or one that contradicts an earlier result, only loses its weight.

A test can be bad because of its nodes and, across leaf switches, because of the two uplinks and the
path between them. These are the variables of the inference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import numpy as np

from slurm_health.preflight.localize.belief_propagation import NONE, Floats, Ints
from slurm_health.records.errors import LocalizeError
from slurm_health.records.probe_catalog import Metric
from slurm_health.records.verdict import GroupResult, MetricName, Outcome, Round

_Times = TypeVar("_Times")
_Key = TypeVar("_Key", int, Metric)
_LEAST_MS, _MOST_MS = 1e-9, 1e12  # less than a clock cycle, more than a lifetime
_LEAF_IS_BAD, _PATH_IS_BAD = 0.003, 0.001
USUAL_RISK = 0.02  # the prior of a node without a history


class Bearing(Enum):
    """What a test shows about whether the members of its group can work together."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"  # not run, a silent or crashed member, or results that contradict


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The test of a group in a round, by node number, with its credible numbers only.

    `messages` are what the members reported. `doubts` are what was wrong with the numbers.
    `served` is the least share of its processors that any member had.
    """

    round_index: int
    nodes: tuple[int, ...]
    outcome: Outcome
    bearing: Bearing
    shared_ms: Mapping[Metric, float] = field(default_factory=dict)
    node_ms: Mapping[Metric, Mapping[int, float]] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    crashed: tuple[int, ...] = ()
    messages: Mapping[int, str] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    served: float = 1.0

    def partners(self, node: int) -> tuple[int, ...]:
        """Return the other members of the group."""
        return tuple(other for other in self.nodes if other != node)


class RoundLedger:
    """The planned rounds and the accepted results of a run, by node number."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.rounds: list[Round] = []
        self.met: list[set[int]] = [set() for _ in self.names]
        self.trials: dict[tuple[int, tuple[int, ...]], Trial] = {}
        self.observed: set[int] = set()
        self.took_s: dict[int, float] = {}  # known durations, by round
        self._results: dict[tuple[int, tuple[int, ...]], GroupResult] = {}
        self._number = {name: number for number, name in enumerate(self.names)}

    def plan(self, groups: Iterable[Sequence[int]], *, shared_only: bool = False) -> Round:
        """Add a round; results of its groups are accepted from now on."""
        members = [tuple(group) for group in groups]
        round_ = Round(
            index=len(self.rounds),
            groups=tuple(tuple(self.names[node] for node in group) for group in members),
            shared_only=shared_only,
        )
        for group in members:
            for node in group:
                self.met[node].update(other for other in group if other != node)
        self.rounds.append(round_)
        return round_

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
        results = list(results)
        for result in results:
            self._check_members(round_index, planned, result)
        for result in results:
            nodes = tuple(sorted(self._number[name] for name in result.nodes))
            first = self._results.setdefault((round_index, nodes), result)
            if (round_index, nodes) not in self.trials:
                self.trials[round_index, nodes] = self._trial(round_index, nodes, result)
            elif _content(first) != _content(result):
                self.trials[round_index, nodes] = Trial(
                    round_index=round_index,
                    nodes=nodes,
                    outcome=Outcome.NOT_RUN,
                    bearing=Bearing.UNKNOWN,
                    doubts=("two results that contradict each other",),
                )
            if result.round_s is not None:
                self.took_s[round_index] = result.round_s
        self.observed.add(round_index)

    def in_order(self) -> list[Trial]:
        """Return all trials by round and then by members, however they arrived."""
        return [self.trials[key] for key in sorted(self.trials)]

    def _check_members(
        self, round_index: int, planned: set[frozenset[str]], result: GroupResult
    ) -> None:
        """Refuse a result of a group that was not planned, or that reports on other nodes."""
        nodes = frozenset(result.nodes)
        named = nodes.union(result.silent, result.crashed, result.said, *result.node_ms.values())
        if nodes in planned and named == nodes and len(nodes) == len(result.nodes):
            return
        group = ", ".join(result.nodes)
        if nodes not in planned or named == nodes:
            raise LocalizeError(f"round {round_index} never planned the group {group}")
        strangers = ", ".join(sorted(named - nodes))
        raise LocalizeError(
            f"round {round_index}, group {group}: reports about {strangers}, not a member"
        )

    def _trial(self, round_index: int, nodes: tuple[int, ...], result: GroupResult) -> Trial:
        doubts: list[str] = []
        started = result.outcome is not Outcome.NOT_RUN
        measured = result.outcome is Outcome.MEASURED
        silent = tuple(sorted(self._number[name] for name in result.silent))
        crashed = tuple(sorted(self._number[name] for name in result.crashed))
        node_ms = {
            metric: _credible(
                {self._number[node]: ms for node, ms in times.items()}, metric, doubts
            )
            for metric, times in sorted(_by_metric(result.node_ms).items())
            if started
        }
        shared = _by_metric(result.shared_ms) if measured else {}
        shared = _credible(shared, None, doubts)
        bearing = Bearing.PASSED if measured else Bearing.FAILED
        if silent or crashed or not started:
            bearing, shared = Bearing.UNKNOWN, {}
        if bearing is Bearing.FAILED and len(nodes) == 1:
            crashed, bearing = nodes, Bearing.UNKNOWN  # no other node was involved
        return Trial(
            round_index=round_index,
            nodes=nodes,
            outcome=result.outcome,
            bearing=bearing,
            shared_ms=shared,
            node_ms=node_ms,
            silent=silent,
            crashed=crashed if started else (),
            messages={self._number[name]: text for name, text in result.said.items()},
            doubts=tuple(doubts),
            served=result.served,
        )


def _by_metric(times: Mapping[MetricName, _Times]) -> dict[Metric, _Times]:
    """Return times by metric; a plain name is that of a probe, or `probe:part`."""
    metrics: dict[Metric, _Times] = {}
    for name, value in times.items():
        if isinstance(name, Metric):
            metrics[name] = value
        else:
            probe, _, part = name.partition(":")
            metrics[Metric(probe=probe, part=part)] = value
    return metrics


def _credible(
    times: Mapping[_Key, float], metric: Metric | None, doubts: list[str]
) -> dict[_Key, float]:
    """Return the possible times; append to `doubts` if there are others."""
    credible = {key: float(ms) for key, ms in times.items() if _LEAST_MS <= ms <= _MOST_MS}
    if len(credible) < len(times):
        what = f"a {metric} time" if metric else "a time of the group"
        doubts.append(f"{what} that cannot be a time was left out")
    return credible


def _content(result: GroupResult) -> tuple[object, ...]:
    """Return the content of a result regardless of order; NaN equals NaN."""
    return (
        result.outcome,
        sorted((str(metric), repr(ms)) for metric, ms in result.shared_ms.items()),
        sorted(
            (str(metric), sorted((node, repr(ms)) for node, ms in times.items()))
            for metric, times in result.node_ms.items()
        ),
        sorted(result.silent),
        sorted(result.crashed),
        sorted(result.said.items()),
    )


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The leaf switch of each node (-1: unknown) and the names of the leaves.

    `unnamed` are leaves without a topology: sets of nodes whose tests show a common uplink.
    """

    leaves: tuple[str, ...]
    leaf: tuple[int, ...]
    unnamed: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(names: Sequence[str], topology: Mapping[str, Sequence[str]] | None) -> Fabric:
        """Return the fabric of these nodes; switches without any of them are left out.

        Raises:
            LocalizeError: a node is on two leaf switches.
        """
        number = {name: index for index, name in enumerate(names)}
        leaf = [NONE] * len(names)
        leaves: list[str] = []
        for switch, members in (topology or {}).items():
            here = [number[name] for name in dict.fromkeys(members) if name in number]
            for node in here:
                if leaf[node] != NONE:
                    raise LocalizeError(
                        f"node {names[node]} is on two leaf switches,"
                        f" {leaves[leaf[node]]} and {switch}"
                    )
                leaf[node] = len(leaves)
            if here:
                leaves.append(switch)
        return Fabric(leaves=tuple(leaves), leaf=tuple(leaf))

    @property
    def known(self) -> bool:
        """Whether the topology puts nodes on different leaves."""
        return len(self.leaves) > 1


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The variables of the inference, in order: nodes, leaves, unnamed leaves, tested paths."""

    table: Ints  # a row per trial, padded with NONE
    paths: tuple[tuple[int, int], ...]
    nodes: int
    leaves: int

    @property
    def variables(self) -> int:
        """The number of variables."""
        return self.nodes + self.leaves + len(self.paths)


def sources_of(trials: Sequence[Trial], fabric: Fabric) -> Sources:
    """Return which variables each trial involves."""
    nodes, leaves = len(fabric.leaf), len(fabric.leaves) + len(fabric.unnamed)
    pairs = [(*trial.nodes, NONE)[:2] for trial in trials]
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    leaf = np.full(nodes + 1, NONE, dtype=np.int64)  # the last is that of NONE
    if fabric.known:
        leaf[:nodes] = fabric.leaf
    for number, members in enumerate(fabric.unnamed, len(fabric.leaves)):
        leaf[list(members)] = number
    uplinks = leaf[ends]
    crossing = (ends[:, 1] != NONE) & (uplinks[:, 0] != uplinks[:, 1])
    columns, paths = [ends], np.empty((0, 2), dtype=np.int64)
    if fabric.known:
        crossing &= (uplinks != NONE).all(axis=1)
        uplinks = np.sort(uplinks, axis=1)
    if fabric.known or fabric.unnamed:
        both = np.where(uplinks == NONE, NONE, nodes + uplinks)
        columns.append(np.where(crossing[:, None], both, NONE))
    if fabric.known:
        paths, number_of = np.unique(uplinks[crossing], axis=0, return_inverse=True)
        path = np.full((len(ends), 1), NONE, dtype=np.int64)
        path[crossing, 0] = nodes + leaves + number_of.reshape(-1)
        columns.append(path)
    return Sources(
        table=np.concatenate(columns, axis=1),
        paths=tuple((int(low), int(high)) for low, high in paths),
        nodes=nodes,
        leaves=leaves,
    )


def odds_of(sources: Sources, prior: Mapping[int, float]) -> Floats:
    """Return log prior odds: of nodes relative to the usual, of leaves and paths absolute.

    A prior orders and shifts; it is bounded so that it can never convict or acquit.
    """

    def logit(probability: float) -> float:
        return float(np.log(probability / (1 - probability)))

    odds = np.zeros(sources.variables)
    odds[sources.nodes :] = logit(_LEAF_IS_BAD)
    odds[sources.nodes + sources.leaves :] = logit(_PATH_IS_BAD)
    for node, probability in prior.items():
        odds[node] = logit(min(max(probability, 0.001), 0.3)) - logit(USUAL_RISK)
    return odds
