# SPDX-License-Identifier: Apache-2.0
"""Rounds, their results, verdicts about nodes, and the names of actions.

The Localizer, the journal, the actions and the report share these values. They load nothing heavy,
so that a report can be printed without numpy. They are msgspec's structs: every agent of a check
loads them, and dataclasses would take half as long as all other imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Self

import msgspec

from slurm_health.records.probe_catalog import Metric

# Programs without probes, such as a simulation, name a metric by a plain word.
MetricName = Metric | str


class Outcome(Enum):
    """The end of one group in one round."""

    MEASURED = "measured"
    FAILED = "failed"  # a member's probe raised or its process died
    TIMED_OUT = "timed_out"  # the deadline passed while members were still at it
    NOT_RUN = "not_run"  # the group never started: says nothing about the network or the nodes


class Level(Enum):
    """The conclusion about one node."""

    HEALTHY = "healthy"
    SLOW = "slow"
    FAULTY = "faulty"
    INCONCLUSIVE = "inconclusive"


class Severity(StrEnum):
    """How bad a fact is for the job; a page is coloured by it."""

    ERROR = "error"
    WARNING = "warning"
    UNDECIDED = "undecided"
    OK = "ok"
    INFO = "info"


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that are measured at the same time. A node is in at most one of them.

    `shared_only`: no node is in doubt, so only the probes of the whole group run again.
    """

    index: int
    groups: tuple[tuple[str, ...], ...]
    shared_only: bool = False


class GroupResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one group of one round.

    Args:
        nodes: its members.
        outcome: how it ended.
        shared_ms: one value for the whole group per metric: a collective is as slow as its slowest
            member.
        node_ms: one value per node and metric.
        silent: members that never took part, because no process there answered or because their
            probe could not measure; the others are not to blame.
        crashed: members whose own probe process died or raised, or measured a fault of its node;
            their partners are not to blame.
        said: reports of members, by node.
        round_s: how long the whole round took, None if it is unknown.
        served: the least share of processor time that a member had for its own work. The rest is
            left out of `node_ms` and, as far as possible, of `shared_ms`.
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
    it: never empty for SLOW and FAULTY. For HEALTHY it leaves out tests that passed.
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


class StorageBlame(StrEnum):
    """Whose matter it is that storage is not well, where it is no node's."""

    SERVER = "server"  # or the network to it
    USER = "user"  # a full quota or disk, a path that the user may not write
    UNDECIDED = "undecided"


class StorageVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The conclusion about a path that is not well on `nodes`, none of which is to blame."""

    path: str
    blame: StorageBlame
    level: Level
    reason: str
    nodes: tuple[str, ...] = ()


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
    """A name in the journal. A newer version's name is kept unchanged."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown


class Action(_Name):
    """An act on nodes, or on the job."""

    DRAIN = "drain"
    DROP = "drop"  # the job continues with fewer nodes
    EXCLUDE = "exclude"  # the job's next attempt is to run on other nodes
    REQUEUE = "requeue"
    PROCEED = "proceed"
    CANCEL = "cancel"  # by the monitor, if a training hangs and its user wants that
    END_SCRIPT = "end_script"  # the same, so that the script can be started again


class Disposition(_Name):
    """The job's next step after the check."""

    PROCEED = "proceed"
    REQUEUE = "requeue"
    STOP = "stop"
