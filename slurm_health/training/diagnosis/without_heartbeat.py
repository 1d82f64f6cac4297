# SPDX-License-Identifier: Apache-2.0
"""Whether ranks without a heartbeat stand still, once something else has shown that they may."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.pace import Patience
from slurm_health.training.diagnosis.seen import (
    Standstill,
    loading_ranks,
    still_works,
    waiting_ranks,
)
from slurm_health.training.diagnosis.watched import Looked, Pause, Watched

Judged = tuple[Standstill, FlightRecords] | str


def judged(
    watched: Watched,
    looked: Looked,
    nodes: Sequence[str],
    pause: Pause,
    patience: Patience,
) -> Judged:
    """Return what was seen of the training, or why it does not hang so far.

    Args:
        watched: all that the monitors told,
        looked: what a closer look showed `pause.window_s` before the last of it.
        nodes: those of the job.
        pause: since when nothing showed that it goes on.
        patience: with ranks that work.
    """
    stills = [
        looked.standstill(program, tuple(nodes), pause) for program in watched.programs.values()
    ]
    if not stills:
        return "no process of the training can be seen"
    for still, flights in stills:
        waiting = waiting_ranks(still.ranks, flights)
        loading = loading_ranks(still.ranks)
        if reason := still_works(still, waiting, patience, loading=loading):
            return reason
    # A job may run more than its training; that is what has the most ranks.
    return max(stills, key=lambda each: len(each[0].ranks))
