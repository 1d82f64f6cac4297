# SPDX-License-Identifier: Apache-2.0
"""How likely a time is: normal noise around the slowest source, and now and then a spike."""

from __future__ import annotations

import numpy as np

from slurm_health.core.localize_bp import Floats, Numbers

_TOP = float(np.log(300.0))  # the largest slowdown that is told apart from a larger one
_FIRST_TOP = 0.5  # the grid reaches at least this far, and as far as the slowest time
_STEP, _GROWTH = 0.03, 0.17  # between states: absolute for small slowdowns, relative for large
_SPIKE_MEAN = 0.4  # mean log-excess of a spike
_STRAY = 1e-5  # density of a time that nothing explains


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
    """Return (batch, grid, tests): how likely each excess is, given the slowest source's state."""
    above = excess[:, None, :] - states[:, None]
    variance = noise[:, None, None] ** 2 + spread[:, None] ** 2
    normal = np.exp(-0.5 * above**2 / variance) / np.sqrt(2 * np.pi * variance)
    rare = spikes[:, None, None]
    density: Numbers = np.log((1 - rare) * normal + rare * _spike(above) + _STRAY)
    return density


def ordinary(excess: Floats, noise: Floats, spikes: Floats) -> Floats:
    """Return the probability that a test whose sources are all well is no spike."""
    level = noise[:, None]
    normal = np.exp(-0.5 * (excess / level) ** 2) / (level * np.sqrt(2 * np.pi))
    normal = (1 - spikes[:, None]) * normal
    probability: Floats = normal / (normal + spikes[:, None] * _spike(excess) + _STRAY)
    return probability


def _spike(above: Numbers) -> Numbers:
    density: Numbers = np.exp(-np.maximum(above, 0) / _SPIKE_MEAN) / _SPIKE_MEAN * (above > 0)
    return density


def weighted_median(times: Floats, weights: Floats) -> float:
    """Return the median of sorted `times`, between the two middle ones where weights meet."""
    total = np.cumsum(weights)
    low = int(np.searchsorted(total, total[-1] * 0.5 * (1 - 1e-12)))
    high = int(np.searchsorted(total, total[-1] * 0.5 * (1 + 1e-12)))
    return float(times[low] + times[min(high, len(times) - 1)]) / 2
