# SPDX-License-Identifier: Apache-2.0
"""What a round is, what came out of it, and what is concluded about each node.

These values are shared by the Localizer, the journal, the actions and the report. They load
nothing heavy, so that a report can be printed where numpy is not installed. They are msgspec's
structs: each agent of a check loads them, and dataclasses would take half as long as all else.

The names of what is done about it stand here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Self

import msgspec

from slurm_health.records.probe_catalog import Metric

# Who has no probes, a simulation for one, names a metric by a plain word.
MetricName = Metric | str


class Outcome(Enum):
    """What happened to one group in one round."""

    MEASURED = "measured"
    FAILED = "failed"  # a member's probe raised or its process died
    TIMED_OUT = "timed_out"  # the deadline passed while members were still at it
    NOT_RUN = "not_run"  # the group never started: says nothing about the network or the nodes


class Level(Enum):
    """What is concluded about one node."""

    HEALTHY = "healthy"
    SLOW = "slow"
    FAULTY = "faulty"
    INCONCLUSIVE = "inconclusive"


class Severity(StrEnum):
    """How bad a fact is for the job; a page colours it so."""

    ERROR = "error"
    WARNING = "warning"
    UNDECIDED = "undecided"
    OK = "ok"
    INFO = "info"


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that are measured at the same time. A node is in at most one of them.

    `shared_only`: no node is in doubt, so only what a group does together is measured again.
    """

    index: int
    groups: tuple[tuple[str, ...], ...]
    shared_only: bool = False


class GroupResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one group of one round measured.

    `shared_ms` holds one value for the whole group per metric (a collective is as slow as its
    slowest member), `node_ms` one value per node. `silent` names members that never took part
    because nobody on them answered, or because their probe could not measure; the others are not
    to blame for that. `crashed` names members whose own probe process died or raised, or found
    its node at fault; neither are their partners to blame. `said` holds what members reported.
    `round_s` is how long the whole round took, None where nobody says. `served` is the share of the
    time of its own work that the member had its processors which had them least: the rest is left
    out of `node_ms`, and of a group's times as well as can be.
    """

    nodes: tuple[str, ...]
    outcome: Outcome
    shared_ms: Mapping[MetricName, float] = msgspec.field(default_factory=dict)
    node_ms: Mapping[MetricName, Mapping[str, float]] = msgspec.field(default_factory=dict)
    silent: tuple[str, ...] = ()
    crashed: tuple[str, ...] = ()
    said: Mapping[str, str] = msgspec.field(default_factory=dict)
    round_s: float | None = None
    served: float = 1.0


class NodeVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The conclusion about one node, with its numbers, as the journal holds it.

    `slowdown` is relative to the healthy nodes of the run (1.0 = as fast as they are),
    and above 1 for a healthy node too where one of its devices is slower than most; `probability`
    is the confidence in `level`. `evidence` names the rounds, partners and figures that justify
    it, and is never empty for SLOW and FAULTY.
    """

    node: str
    level: Level
    slowdown: float = 1.0
    probability: float = 1.0
    component: str = "node"
    reason: str = ""
    evidence: tuple[str, ...] = ()


class LinkVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The conclusion about a connection whose nodes are well, as the journal holds it.

    `ends` are two nodes or two leaf switches, or the one leaf switch whose uplink it is. One that
    no topology names is named by its nodes, `n[24-31]`.
    """

    ends: tuple[str, ...]
    level: Level
    slowdown: float = 1.0
    probability: float = 1.0
    reason: str = ""
    evidence: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusion of a run: every node, and the paths and leaves that are not well.

    `floors` are the smallest relative slowdowns that made a node slow in it, by metric.
    """

    nodes: Mapping[str, NodeVerdict]
    paths: tuple[LinkVerdict, ...] = ()
    leaves: tuple[LinkVerdict, ...] = ()
    floors: Mapping[str, float] = msgspec.field(default_factory=dict)

    def named(self, level: Level) -> tuple[str, ...]:
        """Return the nodes at `level`, in the order of the run."""
        return tuple(node for node, verdict in self.nodes.items() if verdict.level is level)


class _Name(StrEnum):
    """A name in the journal. One that only a newer version knows is kept as it is written."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown


class Action(_Name):
    """What is done to nodes, or to the job."""

    DRAIN = "drain"
    DROP = "drop"  # the job goes on with fewer nodes
    EXCLUDE = "exclude"  # the job's next attempt is to run on other nodes
    REQUEUE = "requeue"
    PROCEED = "proceed"
    CANCEL = "cancel"  # by the monitor, where a training hangs and its user wants that
    END_SCRIPT = "end_script"  # the same, so that the script can be started again


class Disposition(_Name):
    """What becomes of the job."""

    PROCEED = "proceed"
    REQUEUE = "requeue"
    STOP = "stop"
