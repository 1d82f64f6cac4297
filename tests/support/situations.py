# SPDX-License-Identifier: Apache-2.0
"""Situations of a job in which something is decided about it."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_health.core.acting.decide import Situation


def situation(
    *,
    requeues: int = 0,
    requeue_obstacle: str = "",
    may_drain: bool = True,
    node_reasons: Mapping[str, str] | None = None,
    hold_obstacle: str = "",
    held_for: frozenset[str] = frozenset(),
) -> Situation:
    """Return what is known of a job whose batch host is n1."""
    return Situation(
        job_id=12,
        batch_node="n1",
        requeues=requeues,
        requeue_obstacle=requeue_obstacle,
        may_drain=may_drain,
        node_reasons=node_reasons or {},
        hold_obstacle=hold_obstacle,
        held_for=held_for,
    )
