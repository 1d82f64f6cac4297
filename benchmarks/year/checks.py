# SPDX-License-Identifier: Apache-2.0
"""What a check says of so many nodes, some of them bad: by the Localizer, or by DLRover's rule.

A year has hundreds of thousands of checks, and only few different ones: so many nodes, and these
kinds of bad ones among them. Each of these is run a few times for real, with other noise and other
partners, and what came of it is remembered. Which nodes they are makes no difference: partners are
drawn by a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.localize import dlrover_accuses
from slurm_health.preflight.localize.localizer import Localizer, LocalizeSettings
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster, Weather, play
from slurm_health.records.verdict import Level, NodeVerdict

# How the bad nodes of a check show themselves: they fail, or they are slower by this factor.
Shown = float
FAILS: Shown = 0.0

# A round of a check, and what comes before the first: torch is loaded, devices are worked
# (docs/performance.md). Where a node fails, it may hang, and its round waits for that.
ROUND_S = 15.0
BEFORE_S = 45.0
HANG_S = 60.0
# A check of more nodes is played as one of these: it would take a minute of a processor each.
MOST = 512


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a check says: of each bad node, and of how many that are well."""

    bad: tuple[NodeVerdict | None, ...]
    innocent: tuple[NodeVerdict, ...]
    rounds: int

    @property
    def took_s(self) -> float:
        """Return how long it took."""
        hangs = any(said is not None and said.level is Level.FAULTY for said in self.bad)
        return BEFORE_S + self.rounds * ROUND_S + HANG_S * hangs


Rule = Callable[[int, Sequence[Shown], int], Outcome]


class Checks:
    """Remembers what came of checks that are alike."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._known: dict[tuple[int, tuple[Shown, ...], int], Outcome] = {}

    def of(self, nodes: int, bad: Sequence[Shown], rng: random.Random) -> Outcome:
        """Return one of the outcomes of a check of `nodes` nodes, of which `bad` are bad."""
        nodes = min(nodes, MOST)
        variant = rng.randrange(_variants(nodes))
        key = (nodes, tuple(bad), variant)
        if key not in self._known:
            self._known[key] = self._rule(nodes, bad, variant)
        return self._known[key]


def _variants(nodes: int) -> int:
    """Return how often a check is run for real: large ones are slow, and differ less."""
    return 8 if nodes <= 16 else 3 if nodes <= 64 else 1


def localized(nodes: int, bad: Sequence[Shown], seed: int) -> Outcome:
    """Return what the Localizer says, with its own defaults."""
    names, faults = _scene(nodes, bad)
    cluster = SimulatedCluster(names, faults=faults, weather=Weather(), seed=seed)
    localizer = Localizer(names, settings=LocalizeSettings(seed=seed))
    verdict, rounds = play(localizer, cluster)
    accused = {
        name: each
        for name, each in verdict.nodes.items()
        if each.level in {Level.FAULTY, Level.SLOW}
    }
    return _outcome(names, bad, accused, len(rounds))


def by_dlrover(nodes: int, bad: Sequence[Shown], seed: int) -> Outcome:
    """Return what DLRover's published rule says: two rounds, and twice the median is slow."""
    names, faults = _scene(nodes, bad)
    cluster = SimulatedCluster(names, faults=faults, weather=Weather(), seed=seed)
    accused, rounds = dlrover_accuses(names, cluster, seed)
    verdicts = {
        name: NodeVerdict(node=name, level=Level.FAULTY, reason="DLRover's rule", evidence=("it",))
        for name in accused
    }
    return _outcome(names, bad, verdicts, rounds)


def _scene(nodes: int, bad: Sequence[Shown]) -> tuple[list[str], Faults]:
    names = [f"n{number}" for number in range(nodes)]
    shown = dict(zip(names, bad, strict=False))
    return names, Faults(
        failing={name: 1.0 for name, how in shown.items() if how == FAILS},
        network={name: how for name, how in shown.items() if how != FAILS},
    )


def _outcome(
    names: Sequence[str], bad: Sequence[Shown], accused: Mapping[str, NodeVerdict], rounds: int
) -> Outcome:
    guilty = names[: len(bad)]
    return Outcome(
        bad=tuple(accused.get(name) for name in guilty),
        innocent=tuple(each for name, each in accused.items() if name not in guilty),
        rounds=rounds,
    )
