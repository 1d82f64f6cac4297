# SPDX-License-Identifier: Apache-2.0
"""The jobs that a cluster has: a few huge, many small. Pure.

The mix is closed: as many jobs of each tier as fill their share of the nodes, and whoever ends is
followed by another of its tier. So the load is the same whatever a policy does, and what differs is
how much of it becomes training. The shares are made: large jobs have most node-hours and are few
(arXiv:2410.21680, figure 3, has the same shape).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

DAY_S = 86400.0
CHECKPOINT_S = 3600.0  # as in arXiv:2410.21680, section on effective training time
# From the start of a script to its first step: torch, data, checkpoint. MegaScale's restarts take
# less than 15 minutes in all.
LOAD_S = 600.0
_SPREAD = 0.5  # of the logarithm of how long jobs are


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Jobs of one size: `nodes` is a number, or a share of the cluster."""

    name: str
    nodes: float
    days: float
    share: float


TIERS = (
    Tier(name="huge", nodes=0.3, days=21.0, share=0.3),
    Tier(name="large", nodes=0.05, days=7.0, share=0.25),
    Tier(name="medium", nodes=16, days=1.0, share=0.25),
    Tier(name="small", nodes=4, days=0.5, share=0.15),
)
LARGE = 1  # tiers up to this one are large jobs


@dataclass(eq=False)
class Job:
    """One job, from its submission to its end.

    `version` changes whenever what was to happen to it no longer does.
    """

    number: int
    tier: int
    slot: int
    size: int
    left_s: float
    nodes: list[int] = field(default_factory=list)
    spares: list[int] = field(default_factory=list)
    excluded: set[int] = field(default_factory=set)
    struck_by: set[int] = field(default_factory=set)
    version: int = 0
    state: str = "queued"  # queued, checking, loading, running
    since_s: float = 0.0  # when its nodes became its own
    running_s: float = 0.0  # since when it makes progress at `speed`
    progress_s: float = 0.0  # since its last start, before that
    speed: float = 1.0
    failed_s: float | None = None
    requeues: int = 0
    restarts: int = 0
    restarts_allowed: int = 0

    @property
    def uid(self) -> int:
        """Return whose it is: each slot is a user's."""
        return 1000 + self.slot


def slots(nodes: int) -> list[tuple[int, int]]:
    """Return tier and size of each job that there is at a time."""
    found = []
    for number, tier in enumerate(TIERS):
        size = max(1, round(tier.nodes * nodes)) if tier.nodes < 1 else int(tier.nodes)
        found += [(number, size)] * max(1, round(tier.share * nodes / size))
    return found


def job_of(slot: int, tier: int, size: int, *, number: int, seed: int) -> Job:
    """Return the next job of a slot."""
    rng = random.Random(f"job {seed} {slot} {number}")
    days = TIERS[tier].days * rng.lognormvariate(-_SPREAD * _SPREAD / 2, _SPREAD)
    return Job(number=number, tier=tier, slot=slot, size=size, left_s=days * DAY_S)
