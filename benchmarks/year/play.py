# SPDX-License-Identifier: Apache-2.0
"""One year of one cluster under one policy. Pure: the seed decides everything."""

from __future__ import annotations

import random

from benchmarks.year import kinds, measures
from benchmarks.year.care import Care, Cluster
from benchmarks.year.checks import Checks, by_dlrover, localized
from benchmarks.year.clock import Clock
from benchmarks.year.jobs import DAY_S
from benchmarks.year.measures import Tally
from benchmarks.year.policies import Policy, Rule
from benchmarks.year.pool import Pool
from benchmarks.year.recording import Recording, as_recorded, resampled
from benchmarks.year.results import Doubt
from benchmarks.year.training import Training
from benchmarks.year.upkeep import Upkeep

# How long persons take where they are doubted to be so slow, of what is assumed of them.
QUICK = 0.25


def checks_of(policy: Policy) -> Checks:
    """Return what a policy's checks say; keep it for other years of the same policy."""
    return Checks(by_dlrover if policy.rule is Rule.DLROVER else localized)


def year(
    recording: Recording,
    policy: Policy,
    checks: Checks,
    *,
    nodes: int,
    seed: int,
    doubt: Doubt = Doubt.NONE,
    days: float | None = None,
) -> dict[str, float]:
    """Return the figures of one run; with as many nodes as the recording has, its own year."""
    own = nodes == recording.nodes
    rng = random.Random(f"cluster {seed} {nodes}")
    histories = as_recorded(recording) if own else resampled(recording, nodes, rng)
    table = kinds.halved(kinds.KINDS) if doubt is Doubt.HALVED else kinds.KINDS
    clock, tally = Clock(), Tally()
    cluster = Cluster(
        policy=policy,
        clock=clock,
        pool=Pool(nodes),
        tally=tally,
        seed=seed,
        person=QUICK if doubt is Doubt.QUICK else 1.0,
    )
    care = Care(histories, table, cluster)
    training, upkeep = Training(cluster, care, checks), Upkeep(cluster, care, checks)
    training.on_start, training.on_spoiled = upkeep.started, upkeep.spoiled
    care.on_out = upkeep.outage
    clock.at(0.0, training.schedule)
    _schedule_often(clock, training)
    until_s = (days or recording.days) * DAY_S
    clock.run(until_s)
    training.settle_all()
    care.settle_all()
    tally.capacity_s = nodes * until_s
    return measures.figures(tally)


def _schedule_often(clock: Clock, training: Training) -> None:
    """Let Slurm look at its queue every minute, for nodes that have come back."""

    def again() -> None:
        training.schedule()
        clock.after(60.0, again)

    clock.after(60.0, again)
