# SPDX-License-Identifier: Apache-2.0
"""Whether a node spoils more of its jobs than other nodes do theirs: the lemon score. Pure.

The unit is a *job* on a node, spoiled or not: the attempts and checks of one job repeat what one
fault does, and would count it often. Several kinds of signals spoil a job (`observation.Signal`),
and several of them at once spoil it once. The window of 28 days, and several signals instead of
one, are those of Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research
Clusters" (HPCA 2025, arXiv:2410.21680), who found lemons by seven signals over 28 days. They cut
each signal's distribution over a fleet of thousands; a smaller fleet has no distribution to cut, so
here each node is compared with all others by an exact test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import exp, lgamma, log, log1p

import msgspec

from slurm_health.records.standings import MOST, Known, Reliability, written
from slurm_health.records.text import counted

WINDOW_DAYS = 28
# Two may be bad luck. That they are two days' says that it comes back: a node that fails all its
# jobs within hours has a fault, and is drained for it.
_LEAST_SPOILED = 3
_LEAST_APART_S = 24 * 3600.0
# How often a fleet without any lemon may show one: a node is suspected by chance in one of twenty.
_CHANCE = 0.05
# The score takes a node for one of the fleet until it has had about as many jobs of its own.
_PRIOR_JOBS = 10
# Fewer jobs than this without a signal say little for a node.
_LEAST_CLEAR = 10


class SpoiledJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job with evidence against a node: when it was first checked there, and whose it is."""

    job: str
    time_s: float
    uid: int
    signals: tuple[str, ...]


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node's jobs within the window: how many, and those it spoiled.

    `users` are those whose checks have ever been on it, two for several.
    """

    node: str
    jobs: int
    users: int
    spoiled: tuple[SpoiledJob, ...] = ()

    @property
    def spoiled_by_users(self) -> int:
        """What the node adds to the rate of all: one user's jobs once, if others use it too.

        Otherwise one user's journals, of jobs that never were, would make the worst node look like
        any other.
        """
        return len({job.uid for job in self.spoiled}) if self.users > 1 else len(self.spoiled)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusion about one node.

    `score` is how many of its next 100 jobs it is expected to spoil; `chance` the probability that
    a fleet of this size without a lemon has a node with so many. `signals` counts jobs.
    """

    node: str
    level: Reliability
    score: float
    chance: float
    jobs: int
    spoiled: int
    elsewhere_jobs: int
    elsewhere_spoiled: int
    signals: dict[str, int]
    reason: str
    evidence: tuple[str, ...] = ()


def standings(records: Iterable[NodeRecord]) -> list[Standing]:
    """Return the conclusion about each node of one cluster, the worst first."""
    nodes = list(records)
    jobs = sum(node.jobs for node in nodes)
    spoiled = sum(node.spoiled_by_users for node in nodes)
    order = list(Reliability)
    concluded = []
    for node in nodes:
        own = len(node.spoiled)
        others, others_spoiled = jobs - node.jobs, spoiled - node.spoiled_by_users
        # Laplace's rule: where little is known of the others, they are not taken to be perfect.
        rate = (others_spoiled + 1) / (others + 2)
        chance = min(1.0, len(nodes) * at_least(own, node.jobs, rate)) if own else 1.0
        expected = (own + _PRIOR_JOBS * rate) / (node.jobs + _PRIOR_JOBS)
        level, reason = _level(node, chance)
        concluded.append(
            Standing(
                node=node.node,
                level=level,
                score=round(100 * expected, 1),
                chance=chance,
                jobs=node.jobs,
                spoiled=own,
                elsewhere_jobs=others,
                elsewhere_spoiled=others_spoiled,
                signals=dict(Counter(signal for job in node.spoiled for signal in job.signals)),
                reason=reason,
                evidence=tuple(job.job for job in node.spoiled),
            )
        )
    return sorted(
        concluded,
        key=lambda standing: (order.index(standing.level), -standing.score, standing.node),
    )


def _level(record: NodeRecord, chance: float) -> tuple[Reliability, str]:
    """Decide what a node is, and why."""
    spoiled, jobs = record.spoiled, counted(record.jobs, "job")
    if not spoiled and record.jobs < _LEAST_CLEAR:
        return Reliability.UNKNOWN, f"no fault seen, but only {jobs}: too few to tell"
    if not spoiled:
        return Reliability.CLEAR, f"no fault seen in {jobs}"
    if len(spoiled) < _LEAST_SPOILED:
        return Reliability.SUSPECT, f"{len(spoiled)} of {jobs}: too few to tell"
    apart_s = max(job.time_s for job in spoiled) - min(job.time_s for job in spoiled)
    if apart_s < _LEAST_APART_S:
        hours = max(1, round(apart_s / 3600))
        return (
            Reliability.SUSPECT,
            f"all within {hours} h: one fault so far, not one that comes back",
        )
    if record.users > 1 and len({job.uid for job in spoiled}) == 1:
        return Reliability.SUSPECT, "only in jobs of one user, and others used it too"
    if chance >= _CHANCE:
        often = "every fleet" if chance > 0.9 else f"1 of {max(2, round(1 / chance))} fleets"
        return Reliability.SUSPECT, f"no more than chance gives a node in {often}"
    often = f"1 of {round(1 / chance):,} fleets" if chance > 1e-9 else "no fleet"
    days = round(apart_s / 86400, 1)
    return Reliability.LEMON, f"again and again over {days:g} days; by chance in {often}"


def at_least(successes: int, trials: int, rate: float) -> float:
    """Return the probability of so many successes or more, in independent trials of this rate."""
    if successes <= 0:
        return 1.0
    terms = (
        exp(
            lgamma(trials + 1)
            - lgamma(k + 1)
            - lgamma(trials - k + 1)
            + k * log(rate)
            + (trials - k) * log1p(-rate)
        )
        for k in range(successes, trials + 1)
    )
    return min(1.0, sum(terms))


def published(clusters: Mapping[str, Iterable[Standing]], *, now_s: float) -> bytes:
    """Return the content of the file that checks read, with the standings of each cluster."""
    worst = {
        cluster: {
            node.node: Known(
                level=node.level, score=node.score, jobs=node.jobs, spoiled=node.spoiled
            )
            for node in nodes
            if node.level in MOST
        }
        for cluster, nodes in clusters.items()
    }
    return written(worst, now_s=now_s)
