# SPDX-License-Identifier: Apache-2.0
"""How many spare nodes a job should ask for, from how often nodes were bad before. Pure.

A count of rare events in a known exposure says of their rate what a gamma distribution says, and of
the next count what a negative binomial one says:

- The interval of a rate is the exact one of F. Garwood, "Fiducial limits for the Poisson
  distribution", Biometrika 28 (1936) 437-442, in quantiles of the gamma distribution.
- The next count is predicted from Jeffreys' prior for a Poisson rate: after `k` events in an
  exposure `T` the rate is Gamma(k + 1/2, T), and the count in an exposure `E` negative binomial
  (A. Gelman et al., "Bayesian Data Analysis", 3rd ed., sections 2.6 and 2.8).
- Events that come in clumps, as those of one node that fails again and again, count as so many
  fewer: the variance of a sum over nodes is that of a Poisson count times `clump` (the design
  effect of L. Kish, "Survey Sampling", 1965).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice, product
from math import ceil, exp, inf, lgamma, log, log1p

from slurm_health.records.standings import Counted, Rates

CONFIDENCE = 0.95
# Of twenty jobs one has more bad nodes than spares. Chosen: a spare that is not needed goes back to
# the pool within minutes, a job without one waits for another node.
RISK = 0.05
# None bad in a hundred leaves a share of up to 3.7 %: with fewer, nothing is known. Chosen.
LEAST_STARTS = 100
# None in 1,000 hours leaves up to 89 failures in 1,000 node-days, 20 times what is recorded below.
LEAST_HOURS = 1000.0
# Where nothing is known of a cluster: 584 faults of 400 nodes in 348 days, as recorded in
# InfiniteHBD-Trace (docs/howto/advise.md).
RECORDED_PER_NODE_DAY = 0.0042
# Of a job's nodes, rounded up: who needs more has a cluster to repair. Chosen.
MOST_SHARE = 0.25
_HOURS_OF_DAY = 24.0
_STEPS = 80  # of bisections: beyond a float's digits
_TAIL = 1e-12


@dataclass(frozen=True, kw_only=True)
class Spares:
    """How many spares to ask for: `count`, where so many bad nodes are `expected`.

    `fewest` and `most` are what the ends of the rates' intervals would ask for. With `count`
    spares more nodes than that are bad with the probability `risk`: more than asked for only where
    the count has met its limit. `recorded` names the rates that too little is known of here, so
    that recorded ones of another cluster stand for them: "starts", "hours".
    """

    count: int
    expected: float
    fewest: int
    most: int
    risk: float
    recorded: tuple[str, ...] = ()


def rate_of(counted: Counted) -> float:
    """Return the usual estimate: events per unit of exposure; 0 where there is no exposure."""
    return counted.events / counted.exposure if counted.exposure else 0.0


def interval(counted: Counted, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the limits between which the rate per unit of exposure lies; 0 to infinity if unknown.

    Garwood's: quantiles of Gamma(k) and Gamma(k + 1) over the exposure, both over the clump.
    """
    if counted.exposure <= 0:
        return 0.0, inf
    events, exposure = counted.events / counted.clump, counted.exposure / counted.clump
    outside = (1 - confidence) / 2
    low = gamma_quantile(outside, events) / exposure if events else 0.0
    return low, gamma_quantile(1 - outside, events + 1) / exposure


def spares_for(
    rates: Rates | None, nodes: int, *, hours: float | None = None, risk: float = RISK
) -> Spares:
    """Return how many spares a job of so many nodes should ask for.

    Args:
        rates: how often nodes were bad before, None where that is not known.
        nodes: that the script is to run on.
        hours: how long it runs, if spares are to replace nodes that fail meanwhile; None if only
            those that are bad when it starts.
        risk: how likely there may be more bad nodes than spares.
    """
    starts: _Rate = RECORDED_PER_NODE_DAY  # what failed in the last day, and nobody has seen
    run: _Rate = RECORDED_PER_NODE_DAY / _HOURS_OF_DAY
    recorded = ["starts"]
    if rates is not None and rates.starts.exposure >= LEAST_STARTS:
        starts, recorded = rates.starts, []
    if rates is not None and rates.hours.exposure >= LEAST_HOURS:
        run = rates.hours
    elif hours is not None:
        recorded.append("hours")
    ran = nodes * (hours or 0.0)
    lemons = rates.lemons * min(1.0, nodes / rates.nodes) if rates and rates.nodes else 0.0
    job = _Job(nodes=nodes, ran=ran, lemons=lemons)
    ends = [job.fewest(_ends(starts)[end], _ends(run)[end], risk)[0] for end in (0, 1)]
    chosen, remaining = job.fewest(starts, run, risk)
    return Spares(
        count=chosen,
        expected=nodes * _typical(starts) + ran * _typical(run) + lemons,
        fewest=min(chosen, *ends),
        most=max(chosen, *ends),
        risk=remaining,
        recorded=tuple(recorded),
    )


# A rate that is taken as it is, or one that is known as well as what was counted tells.
_Rate = float | Counted


def _typical(rate: _Rate) -> float:
    return rate_of(rate) if isinstance(rate, Counted) else rate


def _ends(rate: _Rate) -> tuple[float, float]:
    return interval(rate) if isinstance(rate, Counted) else (rate, rate)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A job of so many nodes, for `ran` hours of a script on a node, and with so many lemons."""

    nodes: int
    ran: float
    lemons: float

    def fewest(self, starts: _Rate, run: _Rate, risk: float) -> tuple[int, float]:
        """Return the fewest spares that suffice but for this risk, or the limit; and what remains.

        Spares may be bad themselves: they start as the others do.
        """
        most = ceil(MOST_SHARE * self.nodes)
        others = _sum_of(_likely(run, self.ran, most), _likely(self.lemons, 1.0, most))
        remaining = 1.0
        for spares in range(most + 1):
            at_start = list(accumulate(islice(_chances(starts, self.nodes + spares), spares + 1)))
            enough = sum(
                chance * at_start[spares - bad] for bad, chance in enumerate(others[: spares + 1])
            )
            remaining = max(0.0, 1 - enough)
            if remaining <= risk:
                return spares, remaining
        return most, remaining


def _chances(rate: _Rate, exposure: float) -> Iterator[float]:
    """Yield the probability of 0, 1, 2, ... events: Poisson, or negative binomial for a count."""
    shape = ratio = 0.0
    if isinstance(rate, Counted):
        shape = rate.events / rate.clump + 0.5
        ratio = exposure / (exposure + rate.exposure / rate.clump)
    mean = 0.0 if isinstance(rate, Counted) else rate * exposure
    logarithm = shape * log1p(-ratio) - mean
    for events in count(1):
        yield exp(logarithm)
        step = ((shape + events - 1) * ratio + mean) / events
        logarithm = logarithm + log(step) if step else -inf


def _likely(rate: _Rate, exposure: float, most: int) -> list[float]:
    """Return the probability of 0, 1, 2, ... events, up to `most` or to what is left out of all."""
    found, left = list[float](), 1.0
    for chance in islice(_chances(rate, exposure), most + 1):
        found.append(chance)
        left -= chance
        if left < _TAIL:
            break
    return found


def _sum_of(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the distribution of the sum of two counts."""
    found = [0.0] * (len(first) + len(second) - 1)
    for (one, p_one), (other, p_other) in product(enumerate(first), enumerate(second)):
        found[one + other] += p_one * p_other
    return found


def gamma_quantile(probability: float, shape: float) -> float:
    """Return below which value a gamma variable of this shape and scale 1 lies so probably."""
    low, high = 0.0, shape + 1
    while gamma_below(high, shape) < probability:
        high *= 2
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if gamma_below(middle, shape) < probability:
            low = middle
        else:
            high = middle
    return high


def gamma_below(value: float, shape: float) -> float:
    """Return the probability of a smaller gamma variable of this shape and scale 1.

    By the series of the incomplete gamma function (M. Abramowitz, I. Stegun, "Handbook of
    Mathematical Functions", 6.5.29), whose terms are all positive.
    """
    if value <= 0:
        return 0.0
    term = total = exp(shape * log(value) - value - lgamma(shape + 1))
    if not term:  # too far from the mean for a float
        return float(value > shape)
    above = shape
    while term > total * _TAIL:
        above += 1
        term *= value / above
        total += term
    return min(1.0, total)
