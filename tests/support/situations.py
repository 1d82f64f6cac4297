# SPDX-License-Identifier: Apache-2.0
"""Jobs about which something is decided."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from slurm_health.preflight.decide.facts import JobFacts

MANY = 1000
NOTHING: Mapping[str, str] = MappingProxyType({})


def job_facts(
    *,
    requeues: int = 0,
    named: frozenset[str] = frozenset(),
    candidates: frozenset[str] | None = None,
    needed: int = 4,
    free: int | None = MANY,
    unusable: Mapping[str, str] = NOTHING,
    may_drain: bool = True,
    no_requeue: str = "",
) -> JobFacts:
    """Return what is known of a job whose batch host is n1, by default with other nodes free."""
    return JobFacts(
        job_id=12,
        batch_node="n1",
        requeues=requeues,
        named=named,
        candidates=candidates,
        partition="main",
        needed=needed,
        free=free,
        unusable=unusable,
        may_drain=may_drain,
        no_requeue=no_requeue,
    )
