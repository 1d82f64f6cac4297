# SPDX-License-Identifier: Apache-2.0
"""The settings of localisation, and the checks of those that a site may choose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from slurm_health.records.errors import LocalizeError

SMALL_RUN = 16  # below this many nodes noise can hardly be estimated from the run itself
# More rounds show little: a pair of good nodes has met by then, see the documentation.
_MOST_ROUNDS, _MOST_ROUNDS_OF_FEW = 8, 12
# Below the least is noise; a value above the largest was meant as per cent, such as 8 for 8 %.
_LEAST_FLOOR, _LARGEST_FLOOR = 0.01, 3.0


class DeviceKind(Enum):
    """What the nodes of a run compute with."""

    CPU = "cpu"
    ACCELERATOR = "accelerator"


@dataclass(frozen=True, kw_only=True)
class Usual:
    """How the times of healthy devices of a kind differ; all relative, 0.05 is 5 %.

    The floors are the smallest slowdowns that are ever reported as a bad node. `noise` is the
    usual difference of two tests of the same nodes, for runs too small to show it. With
    `carries_network`, the device itself moves what goes through the network.
    """

    network_floor: float
    compute_floor: float
    noise: float
    carries_network: bool = False


USUAL: Mapping[DeviceKind, Usual] = MappingProxyType(
    {
        # Network: the least effect that simulated runs could convict without accusing healthy
        # nodes; noise: at which four nodes stay within `error` (docs/explanation/statistics.md).
        # Compute: four deviations of 3 %, which is our reading of how much GPUs of one model differ
        # for good (Sinha et al., SC 2022: they vary by 8 % on average, by 22 % at most).
        DeviceKind.ACCELERATOR: Usual(network_floor=0.08, compute_floor=0.12, noise=0.05),
        # Other jobs may share the cores. Measured on five nodes of one machine with 2 overloaded
        # cores: the log-times of healthy nodes deviate by 0.4 to 0.7, the slowest twentieth takes
        # twice the median. The floors were chosen by simulating milder scatter, see there; an idle
        # machine was not measured, and may allow lower ones.
        DeviceKind.CPU: Usual(
            network_floor=1.0, compute_floor=1.0, noise=0.2, carries_network=True
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class LocalizeSettings:
    """How sure a verdict must be, and how much testing it may cost.

    The floors, `noise` and `carries_network` are those of `Usual`. `error` is the probability, over
    the whole run, that any healthy node is accused. `expected_ms` holds known times
    of good hardware, by metric. They decide when peers cannot: there are none, or all are slow.
    `expected_slack` is the factor by which a time may exceed it. With `alone`, nodes are tested by
    themselves, all at once, and not in pairs. `workload` is what a group of nodes does together,
    for the words of a verdict.
    """

    seed: int = 0
    min_rounds: int = 1
    max_rounds: int | None = None
    compute_floor: float = USUAL[DeviceKind.ACCELERATOR].compute_floor
    network_floor: float = USUAL[DeviceKind.ACCELERATOR].network_floor
    noise: float = USUAL[DeviceKind.ACCELERATOR].noise
    carries_network: bool = USUAL[DeviceKind.ACCELERATOR].carries_network
    error: float = 0.01
    expected_ms: Mapping[str, float] = field(default_factory=dict)
    expected_slack: float = 1.25
    alone: bool = False
    workload: str = "allgather"

    def __post_init__(self) -> None:
        """Refuse values that no run can honour."""
        try:
            _check_count("min_rounds", self.min_rounds)
            _check_fraction("compute_floor", self.compute_floor)
            _check_fraction("network_floor", self.network_floor)
            _check_times_ms("expected_ms", self.expected_ms)
        except ValueError as err:
            raise LocalizeError(str(err)) from err
        if self.max_rounds is not None and self.max_rounds < self.min_rounds:
            raise LocalizeError(
                f"max_rounds ({self.max_rounds}) must not be below min_rounds ({self.min_rounds})"
            )
        if not 0 < self.error < 0.5:
            raise LocalizeError(f"error must lie between 0 and 0.5, not {self.error}")
        if not self.expected_slack > 1:
            raise LocalizeError(f"expected_slack must be above 1, not {self.expected_slack}")

    def round_limit(self, nodes: int) -> int:
        """Return how many rounds a run over `nodes` nodes may take at most."""
        if self.max_rounds is not None:
            return self.max_rounds
        return max(self.min_rounds, _MOST_ROUNDS_OF_FEW if nodes < SMALL_RUN else _MOST_ROUNDS)


# What a site may choose.
CHOICES = ("network_floor", "compute_floor", "min_rounds", "expected_ms")


def settings_from(chosen: Mapping[str, object], *, kind: DeviceKind) -> LocalizeSettings:
    """Return the settings for this kind of device, with a site's choices of `CHOICES`.

    Raises:
        ValueError: a name is not in `CHOICES`, or its value is not allowed.
    """
    for name in chosen:
        if name not in CHOICES:
            raise ValueError(f"{name}: no such setting, there are {', '.join(CHOICES)}")
    usual = USUAL[kind]
    of_kind: dict[str, Any] = {
        "network_floor": usual.network_floor,
        "compute_floor": usual.compute_floor,
        "noise": usual.noise,
        "carries_network": usual.carries_network,
    }
    try:
        return LocalizeSettings(**(of_kind | dict(chosen)))
    except LocalizeError as err:
        raise ValueError(str(err)) from err


def _check_fraction(name: str, value: object) -> None:
    if not _LEAST_FLOOR <= _number(value) <= _LARGEST_FLOOR:
        allowed = f"a number from {_LEAST_FLOOR:g} to {_LARGEST_FLOOR:g}, 0.08 for 8 %"
        raise ValueError(f"{name}: expected {allowed}, found {value!r}")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected a whole number of at least 1, found {value!r}")


def _check_times_ms(name: str, value: object) -> None:
    times_ms = value.items() if isinstance(value, Mapping) else [("", 0.0)]
    if not all(metric and 0 < _number(ms) < math.inf for metric, ms in times_ms):
        allowed = "milliseconds above 0 by metric, {matmul = 3.1, allgather = 50}"
        raise ValueError(f"{name}: expected {allowed}, found {value!r}")


def _number(value: object) -> float:
    """Return a number, NaN for anything else: no range allows that."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)
