# SPDX-License-Identifier: Apache-2.0
"""Uplinks that no topology names: nodes that are slow with all others and well with each other.

A bad uplink slows every node below it in the same way as its own network card would. Where leaf
switches are not known, nodes that look slow are therefore tested with one another before any of
them is convicted. Nodes with slow cards are slow with each other too; the nodes below an uplink
are not, and the set of them is found as what they have in common.
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
_MISTAKEN = 0.01  # how often any pair of slow nodes may be taken for one that is well by chance
_PAIRS_BETWEEN = 2  # that tell a suspect from a set: one may have been hit by a spike
_ODD_TESTS = 2  # of a pair that was slow although neither node is a suspect


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """What several slow nodes may have in common.

    `sets` are nodes that are well with one another and slow with the others. `wanted` pairs would
    tell more; `held` are the nodes that must not be convicted of a slow network, because they are
    in a set or these pairs may put them into one.
    """

    sets: tuple[tuple[int, ...], ...] = ()
    wanted: tuple[Pair, ...] = ()
    held: frozenset[int] = frozenset()


class Inferred(NamedTuple):
    """What the times say, where the nodes hang as this fabric says."""

    fabric: Fabric
    sources: Sources
    odds: Floats
    metrics: tuple[MetricEvidence, ...]

    def uplink(self, found: int) -> int:
        """Return the variable of the uplink of a set that was found."""
        return self.sources.nodes + len(self.fabric.leaves) + found

    def probability_of(self, variable: int) -> float:
        """Return the probability that it is slow in anything that nodes do together."""
        return max(float(m.found.slow[variable]) for m in self.metrics if m.shared)


def _infer_slow(
    trials: Sequence[Trial],
    fabric: Fabric,
    prior: Mapping[int, float],
    settings: LocalizeSettings,
) -> Inferred:
    sources = sources_of(trials, fabric)
    odds = odds_of(sources, prior)
    metrics = tuple(metrics_of(trials, fabric, sources, odds, settings))
    return Inferred(fabric, sources, odds, metrics)


def with_found_uplinks(
    trials: Sequence[Trial],
    fabric: Fabric,
    prior: Mapping[int, float],
    settings: LocalizeSettings,
) -> tuple[Inferred, Suspicion]:
    """Return what the times say, with the uplinks that slow nodes may share; none where known.

    Whoever would be convicted is looked at as a suspect: the nodes below a faint uplink are slow
    beyond doubt over all their tests, and in no single one of them.

    A set whose uplink is believed to be well, although it could explain what its nodes have in
    common, loses those that are believed to be well themselves: among thousands a node is hit by
    spikes in its first two tests, is tested with slow nodes only from then on, and looks like one
    of them that is well with another.
    """
    without = _infer_slow(trials, fabric, prior, settings)
    if fabric.known:
        return without, Suspicion()
    pairs = _pairs(trials, [metric for metric in without.metrics if metric.shared])
    if pairs is None:
        return without, Suspicion()
    apart: set[int] = set()
    convicted = _slow_with_others(trials, without, frozenset(), settings)
    while True:
        suspicion = _suspicion_of(pairs, len(fabric.leaf), convicted, apart)
        inferred, idle = without, set[int]()
        if suspicion.sets:
            inferred = _infer_slow(trials, fabric.with_found(suspicion.sets), prior, settings)
            idle = _idle_members(suspicion, inferred, without)
        more = _slow_with_others(trials, inferred, suspicion.held, settings) - convicted
        if not idle and not more:
            return inferred, suspicion
        apart |= idle
        convicted |= more


def _idle_members(suspicion: Suspicion, inferred: Inferred, without: Inferred) -> set[int]:
    """Return who is believed to be well, and in a set whose uplink is."""
    return {
        node
        for found, nodes in enumerate(suspicion.sets)
        if inferred.probability_of(inferred.uplink(found)) < TRUST
        for node in nodes
        if without.probability_of(node) < TRUST
    }


def _slow_with_others(
    trials: Sequence[Trial],
    inferred: Inferred,
    held: AbstractSet[int],
    settings: LocalizeSettings,
) -> frozenset[int]:
    """Return the nodes that are to be convicted of what they do with others."""
    shared = [metric for metric in inferred.metrics if metric.shared]
    convicted, _ = slow(trials, shared, inferred.sources, {}, held, settings)
    return frozenset(each for each in convicted if each < inferred.sources.nodes)


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """The pairs that were tested; what was tested several times counts once."""

    ends: Ints  # (pairs, 2), the smaller number first
    tests: Ints
    round: Ints  # the first
    excess: Floats  # over any metric the largest log-excess, of its tests the (lower) median
    test_pair: Ints  # of each test, which pair it was
    test_excess: Floats
    noise: float
    limit: float  # log-excess from which on a pair is slow

    @property
    def slow(self) -> _Flags:
        """Tell which pairs were slow."""
        return self.excess > self.limit

    def speaks_for_well(self, slowness: float) -> Floats:
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


def _suspicion_of(
    pairs: _Pairs, nodes: int, convicted: AbstractSet[int], apart: AbstractSet[int]
) -> Suspicion:
    """Return which slow nodes may share an uplink, from tests of two nodes.

    Who is to be `convicted` of a slow network is a suspect too, however faint each of its tests is.
    Nodes in `apart` share no uplink: what made them look so has a likelier explanation.
    """
    suspect = _suspects(pairs, nodes)
    suspect[sorted(convicted)] = True
    groups, unclear = _groups(pairs, suspect, apart)
    sets = [group for group in groups if len(group) > 1]
    alone = [group[0] for group in groups if len(group) == 1]
    tested = {(int(one), int(other)) for one, other in pairs.ends}
    wanted = _Wanted(tested)
    wanted.again(unclear)
    wanted.among(alone)
    for one, other in combinations(sets, 2):
        wanted.between(one, other)
    for node in alone:
        for group in sets:
            wanted.between(group, (node,))
    if len(alone) == 1 and not sets:
        for ends in _odd(pairs, suspect)[:1]:
            wanted.between(tuple(int(end) for end in ends), alone)
    held = wanted.unsettled | {node for group in sets for node in group}
    return Suspicion(sets=tuple(sets), wanted=tuple(wanted.pairs), held=frozenset(held))


def _pairs(trials: Sequence[Trial], metrics: Sequence[MetricEvidence]) -> _Pairs | None:
    excess: dict[int, float] = {}
    for metric in metrics:
        for number, above in zip(metric.trial, metric.found.excess, strict=True):
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
    noise = max(min(quarter, max(metric.found.noise for metric in metrics)), LEAST_NOISE)
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


def _suspects(pairs: _Pairs, nodes: int) -> _Flags:
    """Return who was mostly slow with nodes that are no suspects.

    Round by round, because suspects are tested with one another as soon as they are known, and
    these tests say nothing about whether they are slow with the others.
    """
    suspect = np.zeros(nodes, dtype=np.bool_)
    for number in np.unique(pairs.round):
        slow, fast = np.zeros(nodes), np.zeros(nodes)
        for node, partner in (pairs.ends.T, pairs.ends.T[::-1]):
            counts = (pairs.round <= number) & ~suspect[partner]
            slow += np.bincount(node, weights=counts & pairs.slow, minlength=nodes)
            fast += np.bincount(node, weights=counts & ~pairs.slow, minlength=nodes)
        suspect = (slow >= _SLOW_PARTNERS) & (slow > fast)
    return suspect


def _odd(pairs: _Pairs, suspect: _Flags) -> Ints:
    """Return the pairs that are always slow although neither node is a suspect.

    One of the two may be below the same uplink as a suspect, and have been tested within it since.
    """
    always = pairs.slow & (pairs.tests >= _ODD_TESTS)
    odd: Ints = pairs.ends[always & ~suspect[pairs.ends].any(axis=1)]
    return odd


def _groups(
    pairs: _Pairs, suspect: _Flags, apart: AbstractSet[int]
) -> tuple[list[tuple[int, ...]], Ints]:
    """Return the suspects, each with whom it is well, and these again, in order.

    Also the pairs of suspects that are likelier well than slow, but not so surely that chance could
    not have chosen them among all that were tested: they join nothing until other tests have said
    the same, and nobody in them can be convicted until then.

    Who was slow with nobody yet is left out: everybody is connected with everybody through them.
    Each suspect in `apart` is a group of its own.
    """
    groups: list[tuple[int, ...]] = []
    taken: set[int] = set()
    alike = suspect.copy()
    sometimes_slow = suspect.copy()
    sometimes_slow[pairs.ends[pairs.slow]] = True
    sometimes_slow[list(apart)] = False
    # Of thousands, a few: what is asked of each suspect below is asked of these alone.
    of_suspects = suspect[pairs.ends].any(axis=1)
    pairs = pairs.only(np.logical_or(of_suspects, sometimes_slow[pairs.ends].all(axis=1)))
    unclear = np.zeros(len(pairs.ends), dtype=np.bool_)
    doubtful = sometimes_slow[pairs.ends].all(axis=1)
    compared = int((doubtful & suspect[pairs.ends].any(axis=1)).sum())
    sure = float(np.log(max(compared, 1) / _MISTAKEN))
    for node in np.flatnonzero(suspect):
        if int(node) in taken:
            continue
        well = pairs.speaks_for_well(_slowness(pairs, int(node), suspect))
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

    Where most of its pairs with nodes that are no suspects are too faint to count as slow, it is
    the median of all of those.
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


class _Wanted:
    """Collects the pairs of the next round, each node in one, and whom they may decide about."""

    def __init__(self, tested: AbstractSet[Pair]) -> None:
        self._tested = tested
        self._busy: set[int] = set()
        self.pairs: list[Pair] = []
        self.unsettled: set[int] = set()

    def again(self, pairs: Ints) -> None:
        """Ask for another test of pairs that one more may show to be well, or not."""
        for one, other in pairs:
            pair = int(one), int(other)
            self.unsettled.update(pair)
            if not self._busy & set(pair):
                self._add(pair)

    def among(self, alone: Sequence[int]) -> None:
        """Ask for a test of each of these suspects with another one, if it had none."""
        met = {node for pair in self._tested if set(pair) <= set(alone) for node in pair}
        lonely = [node for node in alone if node not in met]
        if len(lonely) > 1:
            self.unsettled.update(lonely)
            for pair in zip(lonely[::2], lonely[1::2], strict=False):
                self._add(pair)

    def between(self, group: Sequence[int], others: Sequence[int]) -> None:
        """Ask for one more test of a group with others, until there are enough to tell."""
        pairs = [(min(one, other), max(one, other)) for one in group for other in others]
        if sum(pair in self._tested for pair in pairs) >= _PAIRS_BETWEEN:
            return
        self.unsettled.update(others)
        free = (p for p in pairs if p not in self._tested and not self._busy & set(p))
        for pair in islice(free, 1):
            self._add(pair)

    def _add(self, pair: Pair) -> None:
        self.pairs.append(pair)
        self._busy.update(pair)
