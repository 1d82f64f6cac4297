# SPDX-License-Identifier: Apache-2.0
"""What a site may choose about localisation, and what a wrong choice answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_health.errors import LocalizeError

SMALL_RUN = 16  # below this many nodes noise can hardly be estimated from the run itself


@dataclass(frozen=True, kw_only=True)
class LocalizeSettings:
    """How sure a verdict must be, and how much testing it may cost.

    The floors are the smallest slowdowns that are ever reported as a bad node: 0.05 is 5 %.
    `error` is the probability, over the whole run, that any healthy node is accused.
    `expected_ms` holds what a metric takes on good hardware, where that is known; it decides
    where peers cannot, because there are none or all are slow. `expected_slack` is the factor
    by which a time may exceed it.
    Where `alone` is set nodes are tested by themselves, all at once, and not in pairs.
    `first_round` is the number of the first round in the run that this is a part of; `workload`
    is what a group of nodes does together, for the words of a verdict.
    """

    seed: int = 0
    min_rounds: int = 2
    max_rounds: int | None = None
    compute_floor: float = 0.05
    network_floor: float = 0.08
    error: float = 0.01
    expected_ms: Mapping[str, float] = field(default_factory=dict)
    expected_slack: float = 1.25
    alone: bool = False
    first_round: int = 0
    workload: str = "allgather"

    def __post_init__(self) -> None:
        """Refuse values that no run can honour."""
        if self.min_rounds < 1:
            raise LocalizeError(f"min_rounds must be at least 1, not {self.min_rounds}")
        if self.max_rounds is not None and self.max_rounds < self.min_rounds:
            raise LocalizeError(
                f"max_rounds ({self.max_rounds}) must not be below min_rounds ({self.min_rounds})"
            )
        for name in ("compute_floor", "network_floor"):
            if not 0.01 <= getattr(self, name) <= 10:
                raise LocalizeError(f"{name} must lie between 0.01 and 10, see the documentation")
        if not 0 < self.error < 0.5:
            raise LocalizeError(f"error must lie between 0 and 0.5, not {self.error}")
        if not self.expected_slack > 1:
            raise LocalizeError(f"expected_slack must be above 1, not {self.expected_slack}")
        for metric, expected in self.expected_ms.items():
            if not (math.isfinite(expected) and expected > 0):
                raise LocalizeError(f"expected_ms of {metric!r} must be positive, not {expected}")

    def round_limit(self, nodes: int) -> int:
        """Return how many rounds a run over `nodes` nodes may take at most."""
        if self.max_rounds is not None:
            return self.max_rounds
        return max(self.min_rounds, 12 if nodes < SMALL_RUN else 8)
