# SPDX-License-Identifier: Apache-2.0
"""Who is compared: what each does about jobs and nodes, as values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from msgspec import structs

from slurm_health.node.rules.settings import Breaker, Marks, Mend, Recovery


class Rule(Enum):
    """Who checks the nodes of a job before its script."""

    NOBODY = "nobody"
    OURS = "ours"
    DLROVER = "DLRover"


class Lemons(Enum):
    """Who says that a node fails too often to be kept."""

    NOBODY = "nobody"
    OURS = "ours"  # slurm_health.fleet.standing
    META = "Meta"  # the worst nodes of the fleet over 28 days


class Spares(Enum):
    """How many nodes a job asks for beyond those that it runs on, which it keeps."""

    NONE = "none"
    BINOMIAL = "binomial"  # the 99 % point of how many fail in a day (ByteRobust)
    ADVISED = "advised"  # slurm_health.preflight.decide.spares, for the hours of `spares_for_h`


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Tests of idle nodes: how long ago the last was, at what share of the nodes at once.

    In probation, after a repair, the time between tests is `probation_d` at first and grows to
    `every_d` by the end. With `stress` a test is minutes of full load.
    """

    every_d: float = 7.0
    share: float = 0.1
    size: int = 4
    stress: bool = False
    probation_d: float | None = None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What one of the compared does.

    Args:
        local: tests on each node every five minutes and around jobs drain it.
        keeps: a failed script is started again in its job, on its spares if need be.
        pair_test: the epilog has an accused node tested with partners.
        mend: what is done to nodes that we have drained, before they come back.
        persons_burn_in: who repairs a node that we have not drained ends with the same burn-in.
        probation_last: a node in probation is given to large jobs only if there is no other.
        max_requeues: how often a job leaves bad nodes before a person has to submit it again.
    """

    name: str
    source: str
    rule: Rule = Rule.NOBODY
    local: bool = False
    lemons: Lemons = Lemons.NOBODY
    spares: Spares = Spares.NONE
    spares_for_h: float = 24.0
    keeps: bool = False
    pair_test: bool = False
    sweep: Sweep | None = None
    mend: Mend = field(default_factory=Mend)
    persons_burn_in: bool = False
    probation_d: float = 28.0
    probation_last: bool = False
    max_requeues: int = 3
    breaker: Breaker = field(default_factory=Breaker)
    marks: Marks = field(default_factory=Marks)
    recovery: Recovery = field(default_factory=Recovery)


PLAIN = Policy(name="plain", source="sbatch --requeue; a person finds the node")
DLROVER = Policy(
    name="dlrover",
    source="DLRover's node check before each start: two rounds, twice the median is slow",
    rule=Rule.DLROVER,
)
META = Policy(
    name="lemon-cut",
    source="node tests every five minutes, and the worst nodes of 28 days (arXiv:2410.21680)",
    local=True,
    lemons=Lemons.META,
)
SPARES = Policy(
    name="hot-spares",
    source="spares for the 99 % point of a day's failures (arXiv:2509.16293), without localisation",
    spares=Spares.BINOMIAL,
    keeps=True,
)
OURS = Policy(
    name="defaults",
    source="slurm-health as installed: check, hooks, sweep each week, lemons",
    rule=Rule.OURS,
    local=True,
    lemons=Lemons.OURS,
    sweep=Sweep(),
)
# With its defaults, of which the length of a burn-in is one.
MENDING = Mend(enabled=True, dry_run=False, steps=("deep_test",), deep_test=("the site's",))
BURN_IN = replace(
    OURS,
    name="burn-in",
    source="defaults, and [mend] with a deep test under full load",
    mend=MENDING,
)
BEST = replace(
    BURN_IN,
    name="best",
    source="burn-in, pair tests, any number of requeues: all that a site can set",
    pair_test=True,
    max_requeues=100,
)
PERSONS = replace(
    BEST,
    name="best+persons",
    source="best, and persons end their own repairs with the same burn-in",
    persons_burn_in=True,
)
COMPARED = (PLAIN, DLROVER, META, SPARES, OURS, BURN_IN, BEST, PERSONS)

# One change each to what `defaults` does: what a default is worth.
VARIANTS = (
    replace(OURS, name="defaults+pair-test", source="and pair tests", pair_test=True),
    replace(
        OURS,
        name="defaults+kept-spares",
        source="and kept spares for a day",
        spares=Spares.ADVISED,
        keeps=True,
    ),
    replace(
        OURS,
        name="defaults+stress-sweep",
        source="and full load in sweeps",
        sweep=Sweep(stress=True),
    ),
    replace(
        OURS,
        name="defaults+probation",
        source="and probation: full load each day at first, large jobs last",
        sweep=Sweep(stress=True, probation_d=1.0),
        probation_last=True,
    ),
    replace(
        BURN_IN,
        name="burn-in-6h",
        source="burn-in of six hours",
        mend=structs.replace(MENDING, burn_in_h=6.0),
    ),
    replace(
        BURN_IN,
        name="burn-in-90min",
        source="burn-in of a single deep test",
        mend=structs.replace(MENDING, burn_in_h=1.5),
    ),
    replace(
        BURN_IN,
        name="burn-in+persons",
        source="burn-in after every repair",
        persons_burn_in=True,
    ),
    replace(
        OURS,
        name="defaults+breaker-5%",
        source="with a breaker at 5 %",
        breaker=Breaker(share=0.05),
    ),
    replace(OURS, name="defaults+requeues", source="with any number of requeues", max_requeues=100),
    replace(OURS, name="defaults-lemons", source="without lemons", lemons=Lemons.NOBODY),
    replace(
        BEST,
        name="best+kept-spares",
        source="best with kept spares for a day",
        spares=Spares.ADVISED,
        keeps=True,
    ),
    replace(BEST, name="best-pair-test", source="best without pair tests", pair_test=False),
)
BY_NAME = {policy.name: policy for policy in (*COMPARED, *VARIANTS)}
