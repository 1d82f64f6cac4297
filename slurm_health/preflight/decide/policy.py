# SPDX-License-Identifier: Apache-2.0
"""What the user and the site allow to be done about a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class OnStraggler(Enum):
    """What a slow node causes."""

    EXCLUDE = "exclude"  # left for a spare, for fewer nodes, or for others that are free now
    REPORT = "report"  # the job runs with it


class OnUnchecked(Enum):
    """What a job does if its nodes could not be checked."""

    PROCEED = "proceed"
    STOP = "stop"


class OnHang(Enum):
    """What a script causes that hangs."""

    REPORT = "report"
    STOP = "stop"  # the job is cancelled
    RESTART = "restart"  # its processes are ended, and what follows is as after a failure
    OFF = "off"  # nothing looks at it


class Heartbeat(Enum):
    """Whether the script's ranks get a heartbeat that the script does not send itself."""

    OFF = "off"
    AUTO = "auto"  # of the steps of torch's optimizers


class FlightRecorder(Enum):
    """Whether the script's PyTorch records collectives for a post-mortem."""

    OFF = "off"
    ON = "on"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the user and the site allow.

    Args:
        max_requeues: how often one job moves away from bad nodes; Slurm does not count that.
        on_straggler: what a slow node causes.
        max_bad_share: more faulty nodes than this share of a run are no node problem: none of
            them is drained.
        nodes_wanted: the job runs on this many of its nodes and gives the others back; None: all.
        nodes_needed: with as few as this it runs rather than be requeued.
        keep_spares: it keeps healthy nodes beyond `nodes_wanted`, for restarts of its script.
        last_choice: of equally good nodes these are used last.
        on_unchecked: whether it runs with storage whose server is at fault.
        stops: a job that can neither leave a faulty node nor be requeued stops; else it runs on it.
    """

    max_requeues: int = 3
    on_straggler: OnStraggler = OnStraggler.EXCLUDE
    max_bad_share: float = 0.5
    nodes_wanted: int | None = None
    nodes_needed: int | None = None
    keep_spares: bool = False
    last_choice: tuple[str, ...] = ()
    on_unchecked: OnUnchecked = OnUnchecked.PROCEED
    stops: bool = True
