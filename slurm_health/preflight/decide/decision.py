# SPDX-License-Identifier: Apache-2.0
"""What is decided about a job and its nodes: pure values, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_health.preflight.decide.drains import Drain, LeaveAlone
from slurm_health.records.errors import ExitCode
from slurm_health.records.records import Disposition


@dataclass(frozen=True, kw_only=True)
class Shrink:
    """Run on the nodes `keep`, give `drop` back, and stay in possession of `spares`."""

    keep: tuple[str, ...]
    drop: tuple[str, ...]
    reason: str
    spares: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What becomes of the job, and the code the check ends with.

    PROCEED and STOP end the check; REQUEUE starts the job again without `nodes`, and HOLD leaves it
    in the queue because of them, until a person releases it. With `may_stay` the job is to avoid no
    faulty node, only slow or undecided ones: it stays where it cannot leave them. With `keep_size`
    a requeued job waits for as many nodes as it had rather than start on fewer.
    """

    disposition: Disposition
    exit_code: ExitCode
    reason: str
    nodes: tuple[str, ...] = ()
    may_stay: bool = False
    keep_size: bool = False


@dataclass(frozen=True, kw_only=True)
class Question:
    """What Slurm is to be asked before a job leaves slow nodes.

    Could it start at once without the nodes `leave`, on `keep` and on `more` nodes like the first
    of those that it leaves?
    """

    leave: tuple[str, ...]
    keep: tuple[str, ...]
    more: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is done about a verdict.

    Nodes are drained first, then the job is made smaller. The ending comes last: a requeue or a
    hold ends the process that performs it.
    """

    drains: tuple[Drain | LeaveAlone, ...] = ()
    shrink: Shrink | None = None
    ending: Ending
