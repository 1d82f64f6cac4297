# SPDX-License-Identifier: Apache-2.0
"""The evidence of a run: what was planned, what came back, and which of it can be believed.

A result that no planned round can have produced is refused. A result that was planned but
carries impossible numbers, or contradicts an earlier one, only loses its weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from msgspec.structs import replace

from slurm_health.records.errors import LocalizeError
from slurm_health.records.probe_catalog import Metric
from slurm_health.records.verdict import GroupResult, MetricName, Outcome, Round

_Times = TypeVar("_Times")
_Key = TypeVar("_Key", int, Metric)

_LEAST_MS, _MOST_MS = 1e-9, 1e12  # less than a clock cycle, more than a lifetime


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


class Ledger:
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
        self.rounds[-1] = replace(self.rounds[-1], index=index)
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
