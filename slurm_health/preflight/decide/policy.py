# SPDX-License-Identifier: Apache-2.0
"""What the user and the site allow to be done about a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class OnStraggler(Enum):
    """What a slow node causes."""

    EXCLUDE = "exclude"  # left for a spare, for fewer nodes, or for others that are free now
    REPORT = "report"  # the job runs with it
    REQUEUE = "requeue"  # left for a spare or for as many nodes elsewhere, however long it waits
    DRAIN = "drain"  # as EXCLUDE, however long it waits; if proven slow, it leaves the pool


class OnInconclusive(Enum):
    """What a node causes that could not be decided. It is never drained for that."""

    PROCEED = "proceed"
    HOLD = "hold"  # a person decides
    REQUEUE = "requeue"  # the job runs without it, as without a bad one


class OnUnchecked(Enum):
    """What a job does whose nodes could not be checked."""

    PROCEED = "proceed"
    STOP = "stop"
    HOLD = "hold"  # a person decides


class AtRequeueLimit(Enum):
    """What becomes of a job on bad nodes that was requeued as often as it may be."""

    START = "start"
    HOLD = "hold"
    STOP = "stop"


class OnHang(Enum):
    """What a script causes that hangs."""

    REPORT = "report"
    STOP = "stop"  # the job is cancelled
    RESTART = "restart"  # its processes are ended, and what follows is as after a failure
    OFF = "off"  # nothing looks at it


class Heartbeat(Enum):
    """Whether the script's ranks have a heartbeat that the script does not say."""

    OFF = "off"
    AUTO = "auto"  # of the steps of torch's optimizers


class Collect(Enum):
    """Which nodes tell how they are after a failure, and while a training hangs."""

    NODES = "nodes"
    BATCH_HOST = "batch-host"


class FlightRecorder(Enum):
    """Whether the script's PyTorch is told to record collectives for a post-mortem."""

    OFF = "off"
    ON = "on"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the user and the site allow.

    `max_requeues` bounds how often one job moves away from bad nodes, because Slurm does not
    count requeues. More than `max_bad_share` of a run's nodes at once is not a node problem:
    nobody is drained then. Where `nodes_wanted` is set the job runs on that many of its nodes, and
    gives the others back; it makes do with `nodes_needed` rather than be requeued. With
    `keep_spares` it keeps the healthy ones of the others. Of nodes that are as well as others it
    does without those of `last_choice` first.
    """

    max_requeues: int = 3
    on_straggler: OnStraggler = OnStraggler.EXCLUDE
    on_inconclusive: OnInconclusive = OnInconclusive.PROCEED
    at_requeue_limit: AtRequeueLimit = AtRequeueLimit.STOP
    max_bad_share: float = 0.5
    nodes_wanted: int | None = None
    nodes_needed: int | None = None
    keep_spares: bool = False
    last_choice: tuple[str, ...] = ()
