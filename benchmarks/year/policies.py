# SPDX-License-Identifier: Apache-2.0
"""Who is compared: what each does about jobs and nodes, as values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from slurm_health.node.rules.settings import Breaker, Marks, Recovery


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
        burn_in_h: how long a repaired node works under full load before it goes back.
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
    burn_in_h: float = 0.0
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
BEST = replace(
    OURS,
    name="best",
    source="slurm-health with pair tests, probation and a day of full load after a repair",
    pair_test=True,
    sweep=Sweep(stress=True, probation_d=1.0),
    burn_in_h=24.0,
    probation_last=True,
    max_requeues=100,
)
COMPARED = (PLAIN, DLROVER, META, SPARES, OURS, BEST)

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
        OURS,
        name="defaults+burn-in",
        source="and a day of full load after a repair",
        burn_in_h=24.0,
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
    replace(BEST, name="best-burn-in", source="best without a burn-in", burn_in_h=0.0),
)
BY_NAME = {policy.name: policy for policy in (*COMPARED, *VARIANTS)}
