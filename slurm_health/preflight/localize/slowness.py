# SPDX-License-Identifier: Apache-2.0
"""How slow the nodes are in a metric, from times that only show the slowest of a group.

Times are logarithms, so that a slowdown adds. A source has a state on a grid of slowdowns.
An observation is the baseline of its kind plus its slowest source plus noise: mostly normal,
sometimes a spike upwards. Baseline, noise and the share of bad nodes are estimated from the
run. A small run cannot know its noise: it tries several levels and weighs them by their evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slurm_health.preflight.localize.belief_propagation import (
    NONE,
    Beliefs,
    Floats,
    Graph,
    Ints,
    Numbers,
    propagate,
)

FIRST_SLOW = 2  # the first state that a floor's width of healthy difference does not explain
_FIRST_BEYOND = 3  # the floor itself
_TOLERATED = 0.02  # prior probability of being slower than the best, but below the floor
_FEW_TESTS = 100  # below this many tests the noise level is averaged over, not estimated
# Quantiles of the times at which the search for a baseline begins. With much data the second is
# for many slow nodes.
_STARTS, _STARTS_OF_FEW = (0.5, 0.15), (0.0, 0.3, 0.6)
# Healthy devices differ for good. A search that begins at the fastest of a few would measure all
# by it. It allows for half of them to be slow.
_START_ALONE = 0.5
_TURNS = 6  # of estimating baseline, noise and bad share in turn with the beliefs
_WIDE_TURNS = 2  # of these over all tests; later ones spare nodes that are clearly well
_CLEARLY_WELL = -6.0  # log-likelihood ratio of slow to well, over all tests of such a node
_TRUSTED = 0.5  # the others of a test are believed well from this probability on
_NEVER = -60.0  # log odds of a variable that is left out
# Of the usual noise: the levels that a small run tries, and how far from the usual its noise may
# lie (deviation of the logarithm).
_NOISE_LEVELS, _NOISE_WIDTH = (0.3, 0.44, 0.66, 1.0, 1.5, 2.2, 3.4, 5.0, 7.6), 0.8
# Of the usual noise: where the estimate of a large run begins, worth so many tests.
_NOISE_PRIOR, _NOISE_PRIOR_TESTS = 0.6, 12.0
LEAST_NOISE = 0.003  # relative; clocks and schedulers alone make as much
_SPIKES, _SPIKES_PRIOR_TESTS = 0.02, 50.0  # share of tests, and how many tests that belief is worth
_TOP = float(np.log(300.0))  # larger slowdowns look the same
_FIRST_TOP = 0.5  # the grid reaches at least this far, and as far as the slowest time
_STEP, _GROWTH = 0.03, 0.17  # between states: absolute for small slowdowns, relative for large
_SPIKE_MEAN = 0.4  # mean log-excess of a spike
_STRAY = 1e-5  # density of a time that nothing explains


@dataclass(frozen=True, kw_only=True)
class Observations:
    """All times of one metric: `kind` says which of them share a baseline.

    A baseline is at least `least`, and above all at most `ceiling`.
    """

    log_ms: Floats
    sources: Ints
    kind: Ints
    nodes: int
    variables: int
    first_path: int  # the variables from here on are paths
    least: float = float("-inf")
    ceiling: float = float("inf")

    def believable(self, baseline: Floats) -> Floats:
        """Return the nearest baselines within the bounds."""
        return np.minimum(np.maximum(baseline, self.least), self.ceiling)

    @property
    def alone(self) -> bool:
        """Whether a time is that of a single source, which no other can slow down."""
        return bool(self.sources.shape[1] == 1)

    @property
    def few(self) -> bool:
        """Whether there is too little data to estimate the noise from."""
        return len(self.log_ms) < _FEW_TESTS

    def spread(self, quantiles: tuple[float, float]) -> float:
        """Return the widest distance of two quantiles among the kinds."""
        return max(
            float(np.ptp(np.quantile(self.log_ms[self.kind == kind], quantiles)))
            for kind in range(int(self.kind.max()) + 1)
        )


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """The beliefs about a metric.

    `slow` is the probability per variable to be slower than healthy nodes differ, `effect` its
    log-slowdown if so, `beyond` the probability to be slower than the floor; `others` (tests, K)
    the probability that all other sources of a test are well; `excess` (tests) the log-time above
    the baseline; `noise` the relative noise of one test.
    """

    slow: Floats
    effect: Floats
    beyond: Floats
    others: Floats
    excess: Floats
    baseline: Floats
    noise: float


def infer(data: Observations, odds: Floats, floor: float, usual_noise: float) -> Slowness:
    """Return what the times show; `odds` are log prior odds per variable, relative to its kind.

    `usual_noise` is the relative noise of a test to try first. Variables from
    `data.nodes` on are leaves and paths; their `odds` are absolute.
    """
    states, spread = grid_of(floor, float(data.log_ms.max() - data.log_ms.min()))
    model = _Model(data=data, states=states, spread=spread, odds=odds, usual_noise=usual_noise)
    if not data.few:
        wide = not data.alone and data.spread(_STARTS) > 0.5 * np.log1p(floor)
        quantiles = _STARTS if wide else _STARTS[:1]
        starts = [
            model.begin(np.array([_NOISE_PRIOR * usual_noise]), quantile) for quantile in quantiles
        ]
        best = max(starts, key=lambda start: float(start.log_evidence[0]))
        return model.mix([model.finish(best)], np.ones(1))
    levels = np.array(_NOISE_LEVELS)
    prior = np.exp(-0.5 * (np.log(levels) / _NOISE_WIDTH) ** 2)
    starts = [
        model.begin(levels * usual_noise, quantile)
        for quantile in ([_START_ALONE] if data.alone else _STARTS_OF_FEW)
    ]
    return model.mix([model.finish(start) for start in starts], prior)


@dataclass
class _Estimate:
    """The estimates, renewed in turn with the beliefs; every field has a leading batch axis."""

    baseline: Floats  # (batch, kinds)
    noise: Floats
    spikes: Floats
    share: Floats


@dataclass
class _Focus:
    """The tests still in propagation, and the beliefs about all."""

    rows: Ints
    graph: Graph
    messages: Numbers | None
    states: Floats
    well: Floats
    beliefs: Beliefs | None = None  # as they were last renewed

    @property
    def others(self) -> Floats:
        """The probability that all sources of a test except the k-th are well, for every test."""
        others = np.ones((*self.well.shape, len(self.graph.sources)))
        if self.beliefs is not None:
            others[:, self.rows] = self.beliefs.others(FIRST_SLOW - 1)
        return others


@dataclass
class _Fit:
    """One attempt to explain the data."""

    estimate: _Estimate
    focus: _Focus

    @property
    def log_evidence(self) -> Floats:
        beliefs = self.focus.beliefs
        return np.zeros(len(self.estimate.share)) if beliefs is None else beliefs.log_evidence


@dataclass(frozen=True, kw_only=True)
class _Model:
    data: Observations
    states: Floats
    spread: Floats
    odds: Floats
    usual_noise: float

    def begin(self, noise: Floats, quantile: float) -> _Fit:
        """Return a first attempt over all tests, from a guess of noise and baseline."""
        data, batch = self.data, len(noise)
        times = [data.log_ms[tests] for tests in self._by_time]
        # of two devices the faster one, not what lies between them
        start = [
            np.quantile(own, quantile, method="lower" if data.alone else "linear") for own in times
        ]
        estimate = _Estimate(
            baseline=data.believable(np.tile(np.array(start), (batch, 1))),
            noise=noise,
            spikes=np.full(batch, _SPIKES),
            share=np.full(batch, 0.02),
        )
        fit = _Fit(estimate, self._everything(batch))
        if data.first_path < data.variables:
            # a bad leaf looks like as many bad paths, and the one must win
            self._propagate(fit.focus, estimate, with_paths=False)
        for _ in range(_WIDE_TURNS):
            self._turn(fit)
        return fit

    def finish(self, fit: _Fit) -> _Fit:
        """Improve an attempt until it changes no more, in much data only where doubt is left."""
        if not self.data.few:
            fit.focus = self._narrowed(fit.focus, fit.estimate)
        for _ in range(_TURNS - _WIDE_TURNS):
            self._turn(fit)
        return fit

    def _turn(self, fit: _Fit) -> None:
        self._propagate(fit.focus, fit.estimate)
        self._estimate(fit.estimate, fit.focus)

    @cached_property
    def _by_time(self) -> list[Ints]:
        """The tests of each kind, in the order of their times."""
        kind = self.data.kind
        tests = [np.flatnonzero(kind == number) for number in range(int(kind.max()) + 1)]
        return [own[np.argsort(self.data.log_ms[own], kind="stable")] for own in tests]

    def _everything(self, batch: int) -> _Focus:
        tests = len(self.data.sources)
        return _Focus(
            rows=np.arange(tests),
            graph=self._graph(self.data.sources, batch),
            messages=None,
            states=np.exp(self._log_prior(np.full(batch, 0.02))),
            well=np.ones((batch, tests)),
        )

    def _graph(self, sources: Ints, batch: int) -> Graph:
        return Graph.of(sources, self.data.variables, batch=batch, grid=len(self.states))

    def _propagate(self, focus: _Focus, estimate: _Estimate, *, with_paths: bool = True) -> None:
        """Renew the beliefs about the tests in focus."""
        if not len(focus.rows):
            return
        width = self.data.sources.shape[1]
        beliefs = propagate(
            focus.graph,
            self._log_likelihood(estimate, focus.rows),
            self._log_prior(estimate.share, with_paths=with_paths),
            sweeps=4 if self.data.few or width > 2 else 2,
            messages=focus.messages,
            damping=0.3 if self.data.few or width > 2 else 0.0,
        )
        focus.beliefs, focus.messages = beliefs, beliefs.messages
        concerned = focus.graph.present
        focus.states[:, :, concerned] = beliefs.states[:, :, concerned]
        focus.well[:, focus.rows] = beliefs.well

    def _narrowed(self, focus: _Focus, estimate: _Estimate) -> _Focus:
        """Return the focus without the variables that fast tests have cleared."""
        likelihood = self._log_likelihood(estimate, focus.rows)
        ratio = likelihood[0, FIRST_SLOW:].max(axis=0) - likelihood[0, 0]
        sources = self.data.sources
        total = np.zeros(self.data.variables)
        for column, others in zip(sources.T, focus.others[0].T, strict=True):
            # a fast test speaks for a node only if the others in it are not suspects themselves
            counts = (column != NONE) & ((ratio > 0) | (others > _TRUSTED))
            np.add.at(total, column[counts], ratio[counts])
        cleared = total < _CLEARLY_WELL
        reduced = np.where((sources == NONE) | cleared[sources], NONE, sources)
        rows = np.flatnonzero((reduced != NONE).any(axis=1))
        focus.well[:, :] = 1.0
        messages = None if focus.messages is None else focus.messages[:, :, :, rows]
        graph = self._graph(reduced[rows], len(focus.well))
        return _Focus(rows, graph, messages, focus.states, focus.well)

    def _estimate(self, estimate: _Estimate, focus: _Focus) -> None:
        """Renew the estimates from the tests whose sources are believed to be well."""
        excess = self.data.log_ms[None] - estimate.baseline[:, self.data.kind]
        weight = focus.well * ordinary(excess, estimate.noise, estimate.spikes)
        self._rebase(estimate.baseline, weight)
        slow = focus.states[:, FIRST_SLOW:, : self.data.nodes].sum(axis=(1, 2))
        known, extra = (0.2, 10.0) if self.data.few else (0.05, 1.0)
        estimate.share = np.minimum((known + slow) / (self.data.nodes + extra), 0.5)
        if not self.data.few:
            self._scatter(estimate, weight, focus.well)

    def _log_prior(self, share: Floats, *, with_paths: bool = True) -> Floats:
        nodes, variables = self.data.nodes, self.data.variables
        logit = np.tile(self.odds, (len(share), 1))
        logit[:, :nodes] += np.log(share / (1 - share))[:, None]
        if not with_paths:
            logit[:, self.data.first_path :] = _NEVER
        slow = 1 / (1 + np.exp(-logit))
        prior = np.empty((len(share), len(self.states), variables))
        prior[:, 0] = np.log((1 - slow) * (1 - _TOLERATED))
        prior[:, 1:FIRST_SLOW] = np.log((1 - slow) * _TOLERATED / (FIRST_SLOW - 1))[:, None]
        prior[:, FIRST_SLOW:] = np.log(slow / (len(self.states) - FIRST_SLOW))[:, None]
        return prior

    def _log_likelihood(self, estimate: _Estimate, rows: Ints) -> Numbers:
        precision = np.dtype(np.float64 if self.data.few else np.float32)
        excess = self.data.log_ms[rows] - estimate.baseline[:, self.data.kind[rows]]
        known = (excess, self.states, self.spread, estimate.noise, estimate.spikes)
        return log_likelihood(*(np.asarray(values, dtype=precision) for values in known))

    def _rebase(self, baseline: Floats, weight: Floats) -> None:
        """Move the baselines to the weighted medians of their tests, if enough are well."""
        for kind, fastest_first in enumerate(self._by_time):
            times = self.data.log_ms[fastest_first]
            for entry in range(len(baseline)):
                weights = weight[entry, fastest_first]
                if weights.sum() > 0.5:
                    baseline[entry, kind] = weighted_median(times, weights)
        baseline[:] = self.data.believable(baseline)

    def _scatter(self, estimate: _Estimate, weight: Floats, well: Floats) -> None:
        """Renew noise and spike share."""
        excess = self.data.log_ms[None] - estimate.baseline[:, self.data.kind]
        prior = _NOISE_PRIOR_TESTS * (_NOISE_PRIOR * self.usual_noise) ** 2
        squares = (weight * excess**2).sum(axis=1) + prior
        noise = np.sqrt(squares / (weight.sum(axis=1) + _NOISE_PRIOR_TESTS))
        spiky = (well - weight).sum(axis=1) + _SPIKES * _SPIKES_PRIOR_TESTS
        estimate.noise = np.maximum(noise, LEAST_NOISE)
        estimate.spikes = np.clip(spiky / (well.sum(axis=1) + _SPIKES_PRIOR_TESTS), 0.005, 0.2)

    def mix(self, fits: Sequence[_Fit], prior: Floats) -> Slowness:
        """Return the best fits of the noise levels, weighed by evidence and prior of the level."""
        evidence = np.stack([fit.log_evidence for fit in fits])
        best = evidence.argmax(axis=0)
        weight = prior * np.exp(evidence.max(axis=0) - evidence.max())
        weight /= weight.sum()

        def mean(values: Sequence[Floats]) -> Floats:
            chosen = np.stack(values)[best, np.arange(len(weight))]
            average: Floats = np.tensordot(weight, chosen, axes=1)
            return average

        states = mean([fit.focus.states for fit in fits])
        slow = states[FIRST_SLOW:]
        probability = slow.sum(axis=0)
        baseline = mean([fit.estimate.baseline for fit in fits])
        return Slowness(
            slow=probability,
            effect=self.states[FIRST_SLOW:] @ slow / np.maximum(probability, 1e-300),
            beyond=states[_FIRST_BEYOND:].sum(axis=0),
            others=mean([fit.focus.others for fit in fits]),
            excess=self.data.log_ms - baseline[self.data.kind],
            baseline=baseline,
            noise=float(mean([fit.estimate.noise for fit in fits])),
        )


def grid_of(floor: float, reach: float) -> tuple[Floats, Floats]:
    """Return the states up to `reach`, and the deviation of a slowdown from the nearest one."""
    start = float(np.log1p(floor))
    states = [0.0, 0.35 * start, 0.7 * start, start]
    while states[-1] < min(max(reach, _FIRST_TOP), _TOP):
        states.append(states[-1] + max(_STEP, _GROWTH * states[-1]))
    points = np.array(states)
    widths = np.diff(points, append=points[-1] * (1 + _GROWTH))
    widths[0] = 0.0
    return points, widths / np.sqrt(12.0)


def log_likelihood(
    excess: Numbers, states: Numbers, spread: Numbers, noise: Numbers, spikes: Numbers
) -> Numbers:
    """Return (batch, grid, tests): the likelihood of an excess given the slowest source."""
    above = excess[:, None, :] - states[:, None]
    variance = noise[:, None, None] ** 2 + spread[:, None] ** 2
    rare = spikes[:, None, None]
    density: Numbers = above * above  # in place from here: there may be millions
    density *= -0.5 / variance
    np.exp(density, out=density)
    density *= (1 - rare) / np.sqrt(2 * np.pi * variance)
    density += rare * _spike(above)
    density += _STRAY
    return np.log(density, out=density)


def ordinary(excess: Floats, noise: Floats, spikes: Floats) -> Floats:
    """Return the probability that a test whose sources are all well is no spike."""
    level = noise[:, None]
    normal = np.exp(-0.5 * (excess / level) ** 2) / (level * np.sqrt(2 * np.pi))
    normal = (1 - spikes[:, None]) * normal
    probability: Floats = normal / (normal + spikes[:, None] * _spike(excess) + _STRAY)
    return probability


def _spike(above: Numbers) -> Numbers:
    density: Numbers = np.exp(np.maximum(above, 0) / -_SPIKE_MEAN)
    density *= above > 0
    density /= _SPIKE_MEAN
    return density


def weighted_median(times: Floats, weights: Floats) -> float:
    """Return the median of sorted `times`, between the two middle ones where weights meet."""
    total = np.cumsum(weights)
    low = int(np.searchsorted(total, total[-1] * 0.5 * (1 - 1e-12)))
    high = int(np.searchsorted(total, total[-1] * 0.5 * (1 + 1e-12)))
    return float(times[low] + times[min(high, len(times) - 1)]) / 2
