# SPDX-License-Identifier: Apache-2.0
"""A simulated cluster to demonstrate, test and benchmark the Localizer.

A pair takes the base time of its slowest part times noise. The model is deliberately not the
one the Localizer assumes: healthy nodes differ a little, and noise may have heavy tails, spikes,
or strike a whole leaf switch for one round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurm_health.preflight.localize.localizer import Localizer
from slurm_health.records.verdict import GroupResult, MetricName, Outcome, Round, Verdict

ALLGATHER_MS = 50.0
MATMUL_MS = 3.0
_TAIL_FREEDOM = 3  # degrees of freedom of heavy-tailed noise


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What disturbs a measurement without any part being bad; all relative.

    `noise` is the deviation of one test, `spread` that between the networks of healthy nodes and
    `device_spread` that between healthy devices, which repeat in every test; a `spikes` share of
    tests takes up to 1.6 times longer; a `hiccups` share fails. With `congestion`, each round one
    leaf in that many chances takes up to 1.5 times longer across leaves. `drift` is the deviation
    between rounds, in which everything on a shared machine is slower or faster together.
    """

    noise: float = 0.02
    spread: float = 0.01
    device_spread: float = 0.01
    spikes: float = 0.01
    hiccups: float = 0.0
    heavy_tails: bool = False
    congestion: float = 0.0
    drift: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What is bad: probability to fail, or slowdown factor, by node, by leaf or by pair of ends.

    Of a node that computes slowly, the first device does.
    """

    failing: Mapping[str, float] = field(default_factory=dict)
    network: Mapping[str, float] = field(default_factory=dict)
    compute: Mapping[str, float] = field(default_factory=dict)
    leaves: Mapping[str, float] = field(default_factory=dict)
    paths: Mapping[frozenset[str], float] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()

    @property
    def nodes(self) -> frozenset[str]:
        """Return the nodes that are bad themselves."""
        return frozenset({*self.failing, *self.network, *self.compute, *self.silent})


class SimulatedCluster:
    """Answers planned rounds; the same seed gives the same answers.

    Nodes with several `devices` report a time per device.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        *,
        faults: Faults,
        weather: Weather,
        topology: Mapping[str, Sequence[str]] | None = None,
        devices: int = 1,
        seed: int = 0,
    ) -> None:
        self._faults = faults
        self._weather = weather
        self._now = 0.0  # log-slowness of everything in this round
        self._rng = random.Random(seed)  # noqa: S311 - not a secret
        self._leaf = {node: leaf for leaf, members in (topology or {}).items() for node in members}
        self._leaves = sorted(topology or {})
        self._own = self._differences(nodes, weather.spread, faults.network)
        self._devices = [
            self._differences(nodes, weather.device_spread, {} if device else faults.compute)
            for device in range(devices)
        ]

    def _differences(
        self, nodes: Sequence[str], spread: float, slow: Mapping[str, float]
    ) -> dict[str, float]:
        """Return each node's own log-slowness; a fault's factor already contains it."""
        drawn = {node: self._rng.gauss(0, spread) for node in nodes}
        return {node: math.log(slow.get(node, 1.0)) or own for node, own in drawn.items()}

    def answer(self, round_: Round) -> list[GroupResult]:
        """Return the results of the groups of a round."""
        jam = {leaf: self._jam() for leaf in self._leaves}
        if self._weather.drift:
            self._now = self._rng.gauss(0, self._weather.drift)
        return [self._group(group, jam, round_) for group in round_.groups]

    def _group(
        self, group: tuple[str, ...], jam: Mapping[str, float], round_: Round
    ) -> GroupResult:
        faults = self._faults
        silent = tuple(node for node in group if node in faults.silent)
        if silent:
            return GroupResult(nodes=group, outcome=Outcome.TIMED_OUT, silent=silent)
        failed = self._rng.random() < self._weather.hiccups
        for node in group:
            failed |= self._rng.random() < faults.failing.get(node, 0.0)
        matmul = {} if round_.shared_only else self._matmul(group)
        if failed:
            return GroupResult(nodes=group, outcome=Outcome.TIMED_OUT, node_ms=matmul)
        return GroupResult(
            nodes=group,
            outcome=Outcome.MEASURED,
            shared_ms={"allgather": self._allgather_ms(group, jam)},
            node_ms=matmul,
        )

    def _matmul(self, group: tuple[str, ...]) -> dict[MetricName, dict[str, float]]:
        """Return the times of the members by device."""
        parts = [f":device {device}" for device in range(len(self._devices))]
        return {
            f"matmul{part if len(parts) > 1 else ''}": {
                node: MATMUL_MS * math.exp(own[node] + self._now + self._disturbance())
                for node in group
            }
            for part, own in zip(parts, self._devices, strict=True)
        }

    def _allgather_ms(self, group: tuple[str, ...], jam: Mapping[str, float]) -> float:
        faults = self._faults
        slowness = [self._own[node] for node in group]
        slowness.append(math.log(faults.paths.get(frozenset(group), 1.0)))
        leaves = {self._leaf[node] for node in group if node in self._leaf}
        if len(leaves) > 1:
            slowness.extend(math.log(faults.leaves.get(leaf, 1.0)) for leaf in leaves)
            slowness.extend(jam[leaf] for leaf in leaves)
            slowness.append(math.log(faults.paths.get(frozenset(leaves), 1.0)))
        return ALLGATHER_MS * math.exp(max(slowness) + self._now + self._disturbance())

    def _jam(self) -> float:
        if self._rng.random() >= self._weather.congestion:
            return -math.inf
        return self._rng.uniform(0.1, 0.4)

    def _disturbance(self) -> float:
        weather, rng = self._weather, self._rng
        noise = rng.gauss(0, weather.noise)
        if weather.heavy_tails:
            noise /= math.sqrt(rng.gammavariate(_TAIL_FREEDOM / 2, 2) / _TAIL_FREEDOM)
        if rng.random() < weather.spikes:
            noise += math.log(rng.uniform(1.1, 1.6))
        return noise


def play(localizer: Localizer, cluster: SimulatedCluster) -> tuple[Verdict, list[Round]]:
    """Run the Localizer to its end on a simulated cluster."""
    rounds: list[Round] = []
    while (round_ := localizer.next_round()) is not None:
        rounds.append(round_)
        localizer.observe(round_.index, cluster.answer(round_))
    return localizer.verdict(), rounds
