# SPDX-License-Identifier: Apache-2.0
"""How slow each node is in one metric, from times that only show the slowest of a group.

Times are logarithms, so that a slowdown adds. Each source has a state on a grid of slowdowns.
An observation is the baseline of its kind plus its slowest source plus noise: mostly normal,
sometimes a spike upwards. Baseline, noise and the share of bad nodes are estimated from the
run. A small run cannot know its noise, so several levels are tried and weighed by how well each
explains the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurm_health.core.localize_bp import Beliefs, Floats, Graph, Ints, Numbers, propagate

_TOP = float(np.log(300.0))  # the largest slowdown that is told apart from a larger one
_FIRST_TOP = 0.5  # the grid reaches at least this far, and as far as the slowest time
_TOLERATED = 0.02  # prior probability of being slower than the best, but below the floor
_SPIKE_MEAN = 0.4  # mean log-excess of a spike
_STRAY = 1e-5  # density of a time that nothing explains
_FEW_TESTS = 100  # below this many tests the noise level is averaged over, not estimated
_STARTS_OF_FEW = (0.0, 0.3, 0.6)  # quantiles of the times to start looking for a baseline at
_NOISE_LEVELS = (0.015, 0.022, 0.033, 0.05, 0.075, 0.11, 0.17, 0.25, 0.38)
_NOISE_CENTRE, _NOISE_WIDTH = float(np.log(0.05)), 0.8
_NOISE_PRIOR_TESTS, _NOISE_PRIOR = 12.0, 0.03
_SPIKES, _SPIKES_PRIOR_TESTS = 0.02, 50.0


@dataclass(frozen=True, kw_only=True)
class Observations:
    """All times of one metric: `kind` says which of them share a baseline, at most `ceiling`."""

    log_ms: Floats
    sources: Ints
    kind: Ints
    nodes: int
    variables: int
    ceiling: float = float("inf")

    @property
    def few(self) -> bool:
        """Tell whether there is too little data to estimate the noise from."""
        return len(self.log_ms) < _FEW_TESTS


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """What is believed about one metric.

    `slow` is the probability per variable to be slower than healthy nodes differ, `effect` its
    log-slowdown if so; `others` (tests, K) the probability that all other sources of a test are well;
    `excess` (tests) the log-time above the baseline; `noise` the relative noise of one test.
    """

    slow: Floats
    effect: Floats
    others: Floats
    excess: Floats
    baseline: Floats
    noise: float


def grid_of(floor: float, reach: float) -> tuple[Floats, Floats]:
    """Return the states up to `reach`, and the deviation of a slowdown from the nearest one."""
    start = float(np.log1p(floor))
    states = [0.0, 0.35 * start, 0.7 * start, start]
    while states[-1] < min(max(reach, _FIRST_TOP), _TOP):
        states.append(states[-1] + max(0.03, 0.17 * states[-1]))
    points = np.array(states)
    widths = np.diff(points, append=points[-1] * 1.15)
    widths[0] = 0.0
    return points, widths / np.sqrt(12.0)


FIRST_SLOW = 2  # the first state that a floor's width of healthy difference does not explain


def infer(data: Observations, odds: Floats, floor: float) -> Slowness:
    """Return what the times say; `odds` are log prior odds per variable, relative to its kind.

    Variables from `data.nodes` on are leaves and paths; their `odds` are absolute.
    """
    states, spread = grid_of(floor, float(data.log_ms.max() - data.log_ms.min()))
    graph = Graph.of(data.sources, data.variables)
    model = _Model(data=data, graph=graph, states=states, spread=spread, odds=odds)
    noise = np.array(_NOISE_LEVELS) if data.few else np.array([_NOISE_PRIOR])
    fits = [model.fit(noise, quantile) for quantile in (_STARTS_OF_FEW if data.few else (0.35,))]
    return model.mix(fits, noise if data.few else None)


@dataclass(frozen=True)
class _Fit:
    """One estimate per entry of the batch."""

    baseline: Floats  # (batch, kinds)
    noise: Floats
    beliefs: Beliefs


@dataclass(frozen=True, kw_only=True)
class _Model:
    data: Observations
    graph: Graph
    states: Floats
    spread: Floats
    odds: Floats

    def fit(self, noise: Floats, quantile: float) -> _Fit:
        """Estimate baseline and bad share, and with much data the noise, from a first guess."""
        data, batch = self.data, len(noise)
        start = [np.quantile(data.log_ms[data.kind == k], quantile) for k in range(self._kinds)]
        baseline = np.minimum(np.tile(np.array(start), (batch, 1)), data.ceiling)
        share = np.full(batch, 0.02)
        spikes = np.full(batch, _SPIKES)
        beliefs: Beliefs | None = None
        for _ in range(6):
            excess = data.log_ms[None] - baseline[:, data.kind]
            likelihood = self._log_likelihood(excess, noise, spikes)
            beliefs = propagate(
                self.graph,
                likelihood,
                self._log_prior(share),
                sweeps=1 if data.sources.shape[1] == 1 else 4,
                messages=None if beliefs is None else beliefs.messages,
                damping=0.3 if data.few else 0.0,
            )
            weight = beliefs.well * self._ordinary(excess, noise, spikes)
            baseline = self._rebase(baseline, weight)
            slow = beliefs.states[:, : data.nodes, FIRST_SLOW:].sum(axis=2)
            share = self._share(slow)
            if not data.few:
                noise, spikes = self._scatter(baseline, weight, beliefs.well)
        assert beliefs is not None
        return _Fit(baseline, noise, beliefs)

    @property
    def _kinds(self) -> int:
        return int(self.data.kind.max()) + 1

    def _share(self, slow: Floats) -> Floats:
        """Return the estimated share of bad nodes; the pseudo-counts control multiplicity."""
        found, extra = (0.2, 10.0) if self.data.few else (0.05, 1.0)
        share: Floats = np.minimum((found + slow.sum(axis=1)) / (self.data.nodes + extra), 0.5)
        return share

    def _log_prior(self, share: Floats) -> Floats:
        nodes, variables = self.data.nodes, self.data.variables
        logit = np.tile(self.odds, (len(share), 1))
        logit[:, :nodes] += np.log(share / (1 - share))[:, None]
        slow = 1 / (1 + np.exp(-logit))
        prior = np.empty((len(share), variables, len(self.states)))
        prior[:, :, 0] = (1 - slow) * (1 - _TOLERATED)
        prior[:, :, 1:FIRST_SLOW] = ((1 - slow) * _TOLERATED / (FIRST_SLOW - 1))[:, :, None]
        prior[:, :, FIRST_SLOW:] = (slow / (len(self.states) - FIRST_SLOW))[:, :, None]
        return np.log(prior)

    def _log_likelihood(self, excess: Floats, noise: Floats, spikes: Floats) -> Numbers:
        precision = np.float64 if self.data.few else np.float32
        excess, noise, spikes = (v.astype(precision) for v in (excess, noise, spikes))
        above = excess[:, :, None] - self.states.astype(precision)
        variance = noise[:, None, None] ** 2 + self.spread.astype(precision) ** 2
        normal = np.exp(-0.5 * above**2 / variance) / np.sqrt(2 * np.pi * variance)
        spike = np.where(above > 0, np.exp(-np.maximum(above, 0) / _SPIKE_MEAN) / _SPIKE_MEAN, 0)
        rare = spikes[:, None, None]
        density: Numbers = np.log((1 - rare) * normal + rare * spike + _STRAY)
        return density

    def _ordinary(self, excess: Floats, noise: Floats, spikes: Floats) -> Floats:
        """Return the probability that a test of well sources is no spike."""
        level = noise[:, None]
        normal = np.exp(-0.5 * (excess / level) ** 2) / (level * np.sqrt(2 * np.pi))
        spike = np.where(excess > 0, np.exp(-np.maximum(excess, 0) / _SPIKE_MEAN) / _SPIKE_MEAN, 0)
        normal = (1 - spikes[:, None]) * normal
        ordinary: Floats = normal / (normal + spikes[:, None] * spike + _STRAY)
        return ordinary

    def _rebase(self, baseline: Floats, weight: Floats) -> Floats:
        """Return the baselines: the weighted median of the tests believed to be of well sources."""
        fresh = baseline.copy()
        for kind in range(self._kinds):
            chosen = np.flatnonzero(self.data.kind == kind)
            times = self.data.log_ms[chosen]
            order = np.argsort(times, kind="stable")
            for entry in range(len(baseline)):
                weights = weight[entry, chosen][order]
                if weights.sum() > 0.5:
                    median = _weighted_median(times[order], weights)
                    fresh[entry, kind] = min(median, self.data.ceiling)
        return fresh

    def _scatter(self, baseline: Floats, weight: Floats, well: Floats) -> tuple[Floats, Floats]:
        """Return noise and spike share of the tests believed to be of well sources."""
        excess = self.data.log_ms[None] - baseline[:, self.data.kind]
        squares = (weight * excess**2).sum(axis=1) + _NOISE_PRIOR_TESTS * _NOISE_PRIOR**2
        noise = np.sqrt(squares / (weight.sum(axis=1) + _NOISE_PRIOR_TESTS))
        spiky = (well - weight).sum(axis=1) + _SPIKES * _SPIKES_PRIOR_TESTS
        spikes = np.clip(spiky / (well.sum(axis=1) + _SPIKES_PRIOR_TESTS), 0.005, 0.2)
        return np.maximum(noise, 0.003), spikes

    def mix(self, fits: Sequence[_Fit], levels: Floats | None) -> Slowness:
        """Return the fits' beliefs, weighed by evidence and by the prior of the noise level."""
        evidence = np.stack([fit.beliefs.log_evidence for fit in fits])
        best = evidence.argmax(axis=0)
        batch = np.arange(evidence.shape[1])

        def chosen(values: Sequence[Floats]) -> Floats:
            picked: Floats = np.stack(values)[best, batch]
            return picked

        weight = np.ones(1)
        if levels is not None:
            prior = -0.5 * ((np.log(levels) - _NOISE_CENTRE) / _NOISE_WIDTH) ** 2
            score = evidence.max(axis=0) + prior
            weight = np.exp(score - score.max())
            weight /= weight.sum()
        states = np.einsum("b,bvg->vg", weight, chosen([fit.beliefs.states for fit in fits]))
        others = np.einsum("b,bek->ek", weight, chosen([fit.beliefs.others for fit in fits]))
        baseline = weight @ chosen([fit.baseline for fit in fits])
        noise = float(weight @ chosen([fit.noise for fit in fits]))
        slow = states[:, FIRST_SLOW:]
        probability = slow.sum(axis=1)
        effect = slow @ self.states[FIRST_SLOW:] / np.maximum(probability, 1e-300)
        excess = self.data.log_ms - baseline[self.data.kind]
        return Slowness(
            slow=probability,
            effect=effect,
            others=others,
            excess=excess,
            baseline=baseline,
            noise=noise,
        )


def _weighted_median(times: Floats, weights: Floats) -> float:
    """Return the median of sorted `times`, between the two middle ones where weights meet."""
    total = np.cumsum(weights)
    low = int(np.searchsorted(total, total[-1] * 0.5 * (1 - 1e-12)))
    high = int(np.searchsorted(total, total[-1] * 0.5 * (1 + 1e-12)))
    return float(times[low] + times[min(high, len(times) - 1)]) / 2
