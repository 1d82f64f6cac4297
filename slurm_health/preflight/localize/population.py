# SPDX-License-Identifier: Apache-2.0
"""How much devices that are well differ, from all devices of a run.

Devices of one model differ for good: GPUs vary by 8 % on average, and by 22 % at most (Sinha et
al., Not All GPUs Are Created Equal, SC 2022). That repeats in every test, so no number of tests
tells it from a fault. What does is how far a device lies outside the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_health.preflight.localize.belief_propagation import Floats, Ints

_OUTSIDE = 4.0  # deviations from the middle: of 100,000 devices that are well three lie beyond
_LEAST_DEVICES = 8  # of fewer the deviation says little: what the kind usually differs by counts
_MAD_TO_DEVIATION = 1.4826  # of normally distributed values


@dataclass(frozen=True, kw_only=True)
class Population:
    """The devices of a run that can be compared.

    `floor` is the smallest relative slowdown that puts one outside the others; `middle` the
    log-time that half of them do not exceed.
    """

    floor: float
    middle: float


def population_of(log_ms: Floats, devices: Ints, rounds: Ints, floor: float) -> Population:
    """Return what is known of devices from the time, the device and the round of every test.

    The floor is never less than `floor`, which stands for what devices of the kind usually differ
    by: a few devices may happen to be alike.
    """
    typical = _typical(log_ms, devices, rounds)
    outside = _OUTSIDE * _deviation(typical) if len(typical) >= _LEAST_DEVICES else 0.0
    return Population(floor=max(floor, float(np.expm1(outside))), middle=middle(log_ms))


def _typical(log_ms: Floats, devices: Ints, rounds: Ints) -> Floats:
    """Return how far each device typically lies from the middle of its round."""
    above = log_ms.copy()
    for number in np.unique(rounds):
        above[rounds == number] -= middle(log_ms[rounds == number])
    return middle_of_each(above, devices)[1]


def _deviation(values: Floats) -> float:
    return _MAD_TO_DEVIATION * middle(np.abs(values - middle(values)))


def middle(values: Floats) -> float:
    """Return the median; of an even number the lower one, so that half of them may be high."""
    return float(np.sort(values)[(len(values) - 1) // 2])


def middle_of_each(values: Floats, owners: Ints) -> tuple[Ints, Floats]:
    """Return who has any of these values, and the median of each one's own, as `middle` has it."""
    order = np.lexsort((values, owners))
    present, starts, counts = np.unique(owners[order], return_index=True, return_counts=True)
    return present, values[order][starts + (counts - 1) // 2]
