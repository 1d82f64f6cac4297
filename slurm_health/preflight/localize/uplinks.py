# SPDX-License-Identifier: Apache-2.0
"""Uplinks without a topology: nodes that are slow with all others and fast with each other.

A bad uplink slows every node below it in the same way as its own network card would. If leaf
switches are unknown, slow nodes are therefore tested with one another before any of them is
convicted. Nodes with slow cards are slow with each other too; the nodes below an uplink are not,
and their set becomes a leaf without a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slurm_health.preflight.localize.belief_propagation import Floats, Ints
from slurm_health.preflight.localize.conviction import TRUST, slow
from slurm_health.preflight.localize.evidence import (
    Fabric,
    Sources,
    Trial,
    odds_of,
    sources_of,
)
from slurm_health.preflight.localize.metrics import MetricEvidence, metrics_of, middle
from slurm_health.preflight.localize.pairing import Pair
from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.preflight.localize.slowness import LEAST_NOISE

_Flags = npt.NDArray[np.bool_]

_QUARTER_OF_NORMAL = 0.3186  # deviations from the middle, within which a quarter of values lie
_SLOW_PARTNERS = 2  # that are no suspects, and more than fast ones, make a suspect
_BEYOND_NOISE = 3.0  # deviations of a slow test from one of a pair that is well
_MISTAKEN = 0.01  # how often chance may make any pair of slow nodes look well
_PAIRS_BETWEEN = 2  # that separate a suspect from a set: a spike may have hit one
_ODD_TESTS = 2  # of a pair that was slow although neither node is a suspect


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """What several slow nodes may have in common.

    `sets` are nodes that are fast with one another and slow with the others. `wanted` are pairs
    whose tests would show more. `held` are the nodes that must not be convicted of a slow network,
    because they are in a set or these pairs may put them into one.
    """

    sets: tuple[tuple[int, ...], ...] = ()
    wanted: tuple[Pair, ...] = ()
    held: frozenset[int] = frozenset()


class Inferred(NamedTuple):
    """What the times show, given a fabric."""

    fabric: Fabric
    sources: Sources
    odds: Floats
    metrics: tuple[MetricEvidence, ...]

    def probability_of(self, variable: int) -> float:
        """Return the probability that it is slow in anything that nodes do together."""
        return max(float(m.slowness.slow[variable]) for m in self.metrics if m.shared)


def infer_with_uplinks(
    trials: Sequence[Trial],
    fabric: Fabric,
    prior: Mapping[int, float],
    settings: LocalizeSettings,
) -> tuple[Inferred, Suspicion]:
    """Return what the times show, with the uplinks that slow nodes may share if none is known.

    A node that would be convicted is a suspect: the nodes below a faint uplink are slow beyond
    doubt over all their tests, and in no single one of them.

    A set can have an uplink that is believed to be well although it could explain what its nodes
    have in common. Such a set loses the nodes that are believed to be well themselves. Among
    thousands, spikes hit a node in its first two tests; from then on it is tested with slow nodes
    only, and looks like one of them that is fast with another.
    """

    def infer(fabric: Fabric) -> Inferred:
        sources = sources_of(trials, fabric)
        odds = odds_of(sources, prior)
        metrics = tuple(metrics_of(trials, fabric, sources, odds, settings))
        return Inferred(fabric, sources, odds, metrics)

    def slow_nodes(inferred: Inferred, held: AbstractSet[int]) -> frozenset[int]:
        """Return the nodes that would be convicted of what they do with others."""
        shared = [metric for metric in inferred.metrics if metric.shared]
        convicted, _ = slow(trials, shared, inferred.sources, {}, held, settings)
        return frozenset(number for number in convicted if number < inferred.sources.nodes)

    without = infer(fabric)
    shared = [metric for metric in without.metrics if metric.shared]
    pairs = None if fabric.known else _pairs(trials, shared)
    if pairs is None:
        return without, Suspicion()
    apart: set[int] = set()
    convicted = slow_nodes(without, frozenset())
    while True:
        suspicion = _suspicion_of(pairs, len(fabric.leaf), convicted, apart)
        inferred, idle = without, set[int]()
        if suspicion.sets:
            inferred = infer(replace(fabric, unnamed=suspicion.sets))
            first = inferred.sources.nodes + len(fabric.leaves)
            idle = {
                node
                for uplink, nodes in enumerate(suspicion.sets, first)
                if inferred.probability_of(uplink) < TRUST
                for node in nodes
                if without.probability_of(node) < TRUST
            }
        more = slow_nodes(inferred, suspicion.held) - convicted
        if not idle and not more:
            return inferred, suspicion
        apart |= idle
        convicted |= more


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """The tested pairs; several tests of a pair count once."""

    ends: Ints  # (pairs, 2), the smaller number first
    tests: Ints
    round: Ints  # the first
    excess: Floats  # over any metric the largest log-excess, of its tests the (lower) median
    test_pair: Ints  # the pair of each test
    test_excess: Floats
    noise: float
    limit: float  # log-excess from which on a pair is slow

    @property
    def slow(self) -> _Flags:
        """Which pairs were slow."""
        return self.excess > self.limit

    def likelihood_of_well(self, slowness: float) -> Floats:
        """Return the log-likelihood ratio of a pair being well to its being as slow as that.

        With normal noise a test of excess x adds (s^2 - 2 s x) / (2 noise^2). A test counts as
        nothing worse than s and nothing better than 0, so that none outweighs two others.
        """
        above = np.clip(self.test_excess, 0.0, slowness)
        ratio = slowness * (slowness - 2 * above) / (2 * self.noise**2)
        total = np.bincount(self.test_pair, weights=ratio, minlength=len(self.ends))
        return total.astype(np.float64, copy=False)

    def only(self, kept: _Flags) -> _Pairs:
        """Return some of them."""
        of_kept = kept[self.test_pair]
        return replace(
            self,
            ends=self.ends[kept],
            tests=self.tests[kept],
            round=self.round[kept],
            excess=self.excess[kept],
            test_pair=(np.cumsum(kept) - 1)[self.test_pair[of_kept]],
            test_excess=self.test_excess[of_kept],
        )


def _pairs(trials: Sequence[Trial], metrics: Sequence[MetricEvidence]) -> _Pairs | None:
    excess: dict[int, float] = {}
    for metric in metrics:
        for number, above in zip(metric.trial, metric.slowness.excess, strict=True):
            index = int(number)
            if len(trials[index].nodes) == 2:
                excess[index] = max(excess.get(index, -np.inf), float(above))
    if not excess:
        return None
    tests: dict[tuple[int, ...], list[int]] = {}
    for index in sorted(excess):
        tests.setdefault(trials[index].nodes, []).append(index)
    # Without the uplink nothing explains these times, and the estimated noise may be far too large.
    quarter = float(np.quantile(np.abs(list(excess.values())), 0.25)) / _QUARTER_OF_NORMAL
    noise = max(min(quarter, max(metric.slowness.noise for metric in metrics)), LEAST_NOISE)
    floor = min(metric.floor for metric in metrics)
    return _Pairs(
        ends=np.array(list(tests), dtype=np.int64),
        tests=np.array([len(rows) for rows in tests.values()], dtype=np.int64),
        round=np.array([trials[rows[0]].round_index for rows in tests.values()], dtype=np.int64),
        excess=np.array([middle(np.array([excess[r] for r in rows])) for rows in tests.values()]),
        test_pair=np.repeat(np.arange(len(tests)), [len(rows) for rows in tests.values()]),
        test_excess=np.array([excess[r] for rows in tests.values() for r in rows]),
        noise=noise,
        limit=max(float(np.log1p(floor)), _BEYOND_NOISE * noise),
    )


def _suspicion_of(
    pairs: _Pairs, nodes: int, convicted: AbstractSet[int], apart: AbstractSet[int]
) -> Suspicion:
    """Return which slow nodes may share an uplink, and which pairs to test next, a node in one.

    Nodes that are to be `convicted` of a slow network are suspects too, however faint their tests.
    Nodes in `apart` share no uplink: what made them look so has a likelier explanation.
    """
    # Suspects were mostly slow with nodes that are no suspects. This is decided round by round:
    # suspects are tested with one another from then on, which shows nothing about the others.
    suspect = np.zeros(nodes, dtype=np.bool_)
    for number in np.flatnonzero(np.bincount(pairs.round)):
        slow, fast = np.zeros(nodes), np.zeros(nodes)
        for node, partner in (pairs.ends.T, pairs.ends.T[::-1]):
            counts = (pairs.round <= number) & ~suspect[partner]
            slow += np.bincount(node, weights=counts & pairs.slow, minlength=nodes)
            fast += np.bincount(node, weights=counts & ~pairs.slow, minlength=nodes)
        suspect = (slow >= _SLOW_PARTNERS) & (slow > fast)
    suspect[sorted(convicted)] = True

    groups, unclear = _groups(pairs, suspect, apart)
    sets = [group for group in groups if len(group) > 1]
    alone = [group[0] for group in groups if len(group) == 1]
    tested = {(int(one), int(other)) for one, other in pairs.ends}
    wanted: list[Pair] = []
    busy: set[int] = set()
    unsettled: set[int] = set()

    def add(pair: Pair) -> None:
        wanted.append(pair)
        busy.update(pair)

    for ends in unclear:  # another test may show that the pair is well, or not
        pair = int(ends[0]), int(ends[1])
        unsettled.update(pair)
        if not busy & {*pair}:
            add(pair)
    met = {node for pair in tested if {*pair} <= {*alone} for node in pair}
    lonely = [node for node in alone if node not in met]
    if len(lonely) > 1:
        unsettled.update(lonely)
        for pair in zip(lonely[::2], lonely[1::2], strict=False):
            add(pair)
    between: list[tuple[Sequence[int], Sequence[int]]] = list(combinations(sets, 2))
    between += [(group, (node,)) for node in alone for group in sets]
    if len(alone) == 1 and not sets:
        # One node of a pair that is always slow, although neither is a suspect, may be below the
        # same uplink as the suspect, and have been tested within it since.
        always = pairs.slow & (pairs.tests >= _ODD_TESTS) & ~suspect[pairs.ends].any(axis=1)
        between += [(ends.tolist(), alone) for ends in pairs.ends[always][:1]]
    for group, others in between:
        crossing = [(min(one, other), max(one, other)) for one in group for other in others]
        if sum(pair in tested for pair in crossing) < _PAIRS_BETWEEN:
            unsettled.update(others)
            free = (pair for pair in crossing if pair not in tested and not busy & {*pair})
            for pair in islice(free, 1):
                add(pair)
    held = unsettled | {node for group in sets for node in group}
    return Suspicion(sets=tuple(sets), wanted=tuple(wanted), held=frozenset(held))


def _groups(
    pairs: _Pairs, suspect: _Flags, apart: AbstractSet[int]
) -> tuple[list[tuple[int, ...]], Ints]:
    """Return the suspects in groups that are fast with one another, transitively, in order.

    Also return the pairs of suspects that are likelier well than slow, but not so surely that
    chance could not have chosen them among all tested pairs: they join nothing until other tests
    agree, and no node in them can be convicted until then.

    A node that was slow with none yet is left out: all nodes are connected through such nodes. Each
    suspect in `apart` is a group of its own.
    """
    groups: list[tuple[int, ...]] = []
    taken: set[int] = set()
    alike = suspect.copy()
    sometimes_slow = suspect.copy()
    sometimes_slow[pairs.ends[pairs.slow]] = True
    sometimes_slow[list(apart)] = False
    # Of thousands, a few: the loop below compares each suspect with these alone.
    of_suspects = suspect[pairs.ends].any(axis=1)
    pairs = pairs.only(np.logical_or(of_suspects, sometimes_slow[pairs.ends].all(axis=1)))
    unclear = np.zeros(len(pairs.ends), dtype=np.bool_)
    doubtful = sometimes_slow[pairs.ends].all(axis=1)
    compared = int((doubtful & suspect[pairs.ends].any(axis=1)).sum())
    sure = float(np.log(max(compared, 1) / _MISTAKEN))
    for node in np.flatnonzero(suspect):
        if int(node) in taken:
            continue
        well = pairs.likelihood_of_well(_slowness(pairs, int(node), suspect))
        fast = doubtful & (well >= sure)
        among = fast & suspect[pairs.ends].all(axis=1)
        group = _reached(int(node), pairs.ends[fast], len(suspect))
        if 2 * len(group) > len(suspect):  # that leads back to the others: a slow test was missed
            group = _reached(int(node), pairs.ends[among], len(suspect))
        groups.append(tuple(member for member in group if member not in taken))
        taken.update(group)
        alike[group] = True
        unclear |= (pairs.ends == node).any(axis=1) & (well > 0) & (well < sure)
    return groups, pairs.ends[unclear & alike[pairs.ends].all(axis=1)]


def _slowness(pairs: _Pairs, node: int, suspect: _Flags) -> float:
    """Return the median log-excess of a suspect's slow pairs.

    If most of its pairs with nodes that are no suspects are too faint to count as slow, it is the
    median of all of those.
    """
    mine = (pairs.ends == node).any(axis=1)
    outside = mine & (suspect[pairs.ends].sum(axis=1) == 1)
    slow = mine & pairs.slow
    if slow.any() and 2 * (outside & slow).sum() >= outside.sum():
        return float(np.median(pairs.excess[slow]))
    return max(float(np.median(pairs.excess[outside if outside.any() else mine])), LEAST_NOISE)


def _reached(node: int, edges: Ints, nodes: int) -> list[int]:
    """Return the nodes that edges connect with `node`, itself included."""
    inside = np.zeros(nodes, dtype=np.bool_)
    inside[node] = True
    while True:
        touched = edges[inside[edges].any(axis=1)]
        before = inside.sum()
        inside[touched] = True
        if inside.sum() == before:
            return [int(number) for number in np.flatnonzero(inside)]
